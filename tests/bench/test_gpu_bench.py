"""What `bench.gpu` does with a device, on a CPU and at a small size: a GPU is rarely there to show that."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from bench import gpu
from bench.gpu_handoff import handoff_ms
from common.errors import BatonError
from common.types import KVCacheSpec
from engine.attention.base import AttentionShape
from engine.attention.flashinfer import FlashInferBackend
from engine.step import StepRow
from tests.engine.fake_flashinfer import FakePrefillWrapper, fake_flashinfer
from tests.nixl import needs_nixl

pytestmark = pytest.mark.slow

SPEC = KVCacheSpec(model_id="tiny", num_layers=2, num_kv_heads=1, head_dim=16, block_size=16, dtype="bfloat16")


def test_each_figure_of_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = {**gpu.LLAMA_8B, **{key: gpu.SMALL[key] for key in gpu.SMALL if key in gpu.LLAMA_8B}}
    monkeypatch.setattr(gpu, "DEVICE", "cpu")
    monkeypatch.setattr(gpu, "STEPS", 3)
    monkeypatch.setattr(gpu, "MODELS", {"tiny": tiny})
    monkeypatch.setattr(gpu, "busy", lambda *_: (0.5, 7, ["a kernel"]))
    monkeypatch.setattr(gpu, "handoff_ms", lambda *_: (8.0, 2.0))
    args = argparse.Namespace(layers=1, batches=[1, 2], context=20, prompts=[40], parts=gpu.PARTS)
    rows = list(gpu.measure_model("tiny", args, gpu.Limits(100.0, 1.0), tmp_path))
    assert [row["what"] for row in rows] == [
        "tiny decode, batch 1, context 20",
        "tiny decode, batch 2, context 20",
        "tiny prefill, 40 tokens in one step",
        "tiny handoff, 40 tokens",
    ]
    for row in rows[:2]:
        for figure in ("ms", "engine_ms", "engine_ms_ahead"):
            assert isinstance(row[figure], float)
        assert row["idle_ms_ahead"] == row["engine_ms_ahead"] - 0.5  # type: ignore[operator]
    assert rows[3]["last_chunk_of_prefill"] == 2.0 / rows[2]["ms"]  # type: ignore[operator]
    assert "longest" not in gpu.told(rows[0])


def test_steps_of_rows_that_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is computed both ways, and it is told which one the rule takes."""
    fake_flashinfer(monkeypatch)
    tiny = {**gpu.LLAMA_8B, **{key: gpu.SMALL[key] for key in gpu.SMALL if key in gpu.LLAMA_8B}}
    monkeypatch.setattr(gpu, "DEVICE", "cpu")
    monkeypatch.setattr(gpu, "STEPS", 3)
    monkeypatch.setattr(gpu, "busy", lambda *_: (0.5, 7, ["a kernel"]))
    device = gpu.make_device(tiny | {"num_hidden_layers": 1}, tmp_path / "tiny", num_blocks=20, max_model_len=104)
    spec, model = device.info.spec, device._model
    shape = AttentionShape(num_heads=model.num_heads, softmax_scale=model.softmax_scale)
    device._attention = FlashInferBackend(device.kv_cache, spec, shape, cascade=True)
    plan: Callable[..., None] = FakePrefillWrapper.plan
    planned: list[object] = []

    def keep(wrapper: FakePrefillWrapper, rows: torch.Tensor, *tables: object, **options: object) -> None:
        planned.append(rows.tolist())
        plan(wrapper, rows, *tables, **options)

    compute, num_steps = device.compute, 0

    def count(rows: Sequence[StepRow]) -> object:
        nonlocal num_steps
        num_steps += 1
        return compute(rows)

    monkeypatch.setattr(FakePrefillWrapper, "plan", keep)
    monkeypatch.setattr(device, "compute", count)
    row = gpu.shared_row(device, "tiny", 3, 32)
    assert row["what"] == "tiny decode, batch 3, 32 tokens shared"
    assert row["is_taken"] is False
    assert planned
    assert planned == [[0, 3]] * (num_steps // 2), "each of the steps that read once, and none of the others"
    assert row["ms_saved"] == row["ms_row_by_row"] - row["ms"]  # type: ignore[operator]
    assert device.cascades
    assert device._attention.min_saved_tokens > 1


@needs_nixl
def test_blocks_are_read_from_another_process() -> None:
    whole, last = handoff_ms(SPEC, 6, 2, "cpu", repeats=1)
    assert whole > 0.0
    assert last > 0.0


def test_what_the_producer_cannot_do_is_said() -> None:
    with pytest.raises(BatonError, match="kv_dir"):
        handoff_ms(SPEC, 6, 2, "cpu", connector="shared_storage", section={"kv_dir": ""}, repeats=1)
