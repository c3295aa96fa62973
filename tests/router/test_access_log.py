"""Lines about the calls of clients, and log levels that change while a process runs."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from typing import Any

import grpc
import httpx
import pytest

from common.logs import flip_debug, set_level, show_debug, shows_debug
from protos.baton.v1 import inference_pb2
from router.api.access_log import AccessLog
from tests.router.conftest import RunningRouter, StartRouter
from tests.support.fake_worker import FakeWorker

BODY = {"prompt": "x", "max_tokens": 2, "request_id": "mine"}


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [vars(record) for record in caplog.records if record.message == "access"]


async def test_each_call_has_a_line(
    worker: FakeWorker, start_router: StartRouter, caplog: pytest.LogCaptureFixture
) -> None:
    router = await start_router(worker, access_log=1.0)
    with caplog.at_level(logging.INFO):
        async with httpx.AsyncClient(base_url=router.url) as client:
            answer = await client.post("/v1/completions", json=BODY)
            assert (await client.get("/nothing")).status_code == 404
        stream = router.inference.Generate(inference_pb2.GenerateRequest(prompt="x"))
        assert [one async for one in stream]
        with pytest.raises(grpc.aio.AioRpcError):
            await router.inference.Detokenize(inference_pb2.DetokenizeRequest(model="other", token_ids=[1]))
        async with asyncio.timeout(20):
            while len(lines(caplog)) < 4:  # noqa: ASYNC110 (a call has ended before its line is there)
                await asyncio.sleep(0.01)
    told = {(one["interface"], one["call"], one["status"]) for one in lines(caplog)}
    assert told >= {
        ("rest", "POST /v1/completions", "200"),
        ("rest", "GET /nothing", "404"),
        ("grpc", "baton.v1.InferenceService.Generate", "OK"),
        ("grpc", "baton.v1.InferenceService.Detokenize", "NOT_FOUND"),
    }
    whole = next(one for one in lines(caplog) if one["status"] == "200")
    assert (whole["request_id"], whole["num_bytes"]) == ("mine", len(answer.content))
    assert whole["ms"] > 0


def test_a_share_has_lines_and_every_fault(caplog: pytest.LogCaptureFixture) -> None:
    drawn = iter([0.0, 0.09, 0.1, 0.9])
    access = AccessLog(0.1, lambda: next(drawn))
    with caplog.at_level(logging.INFO):
        for status in ("200", "404", "OK", "200"):
            access.ended("rest", "GET /", status, 0.0)
        for status in ("503", "INTERNAL"):
            access.ended("rest", "GET /", status, 0.0)
    assert [one["status"] for one in lines(caplog)] == ["200", "404", "503", "INTERNAL"]


async def test_a_signal_shows_debug_lines_and_no_longer(router: RunningRouter) -> None:
    before = logging.getLogger().level
    for level in (logging.DEBUG, before):
        os.kill(os.getpid(), signal.SIGUSR1)
        async with asyncio.timeout(20):
            while logging.getLogger().level != level:  # noqa: ASYNC110 (a signal's effect cannot be awaited)
                await asyncio.sleep(0.005)
    flip_debug()
    set_level("warning")  # as changed settings do
    assert logging.getLogger().level == logging.DEBUG
    flip_debug()
    assert logging.getLogger().level == logging.WARNING
    set_level(logging.getLevelName(before))
    for is_on in (True, True, False, False):  # as other processes are told, however often
        show_debug(is_on)
        assert (logging.getLogger().level == logging.DEBUG) == is_on == shows_debug()
    assert logging.getLogger().level == before
