"""GetTokenizer reads the files once, however many ask."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from protos.baton.v1 import worker_pb2
from worker import worker_service
from worker.shell import Worker
from worker.worker_service import WorkerServicer


async def test_files_are_read_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    read: list[Path] = []

    def tokenizer_files(model_dir: Path) -> dict[str, bytes]:
        read.append(model_dir)
        return {"tokenizer.json": b"{}"}

    monkeypatch.setattr(worker_service, "tokenizer_files", tokenizer_files)
    servicer = WorkerServicer(cast("Worker", SimpleNamespace(model_dir=tmp_path)))
    context = cast("Any", None)
    ask = worker_pb2.GetTokenizerRequest()
    answers = await asyncio.gather(*(servicer.GetTokenizer(ask, context) for _ in range(8)))
    answers.append(await servicer.GetTokenizer(ask, context))
    assert {answer.files[0].name for answer in answers} == {"tokenizer.json"}
    assert read == [tmp_path]


async def test_a_template_that_does_not_compile_is_said_at_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def wait_ready() -> None:
        pass

    (tmp_path / "tokenizer.json").write_bytes(b"{}")
    worker = cast("Any", SimpleNamespace(model_dir=tmp_path, engine=SimpleNamespace(wait_ready=wait_ready)))
    for template, error in ((b"{{ messages }}", ""), (b"{% if messages %}", "chat_template.jinja cannot be compiled")):
        (tmp_path / "chat_template.jinja").write_bytes(template)
        await Worker.wait_ready(worker)
        assert error in worker.chat_template_error
        assert bool(worker.chat_template_error) is bool(error)
        assert len(caplog.records) == bool(error)
