"""A profile from its points to its page, on a device that takes a known time and on a real one."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import count, islice
from pathlib import Path
from types import SimpleNamespace

import pytest

from baton.cli.main import main
from common.batch_time import Regime, StepShape
from common.batch_time_file import decode
from common.batch_time_fit import KNOTS, fit, model_errors
from common.config import EngineSettings
from engine.profile.design import Limits, edges, random_points, rows_of
from engine.profile.measure import Run, measure_workload
from engine.step import shape_of
from tests.common.test_batch_time import KEY
from tests.engine.tiny_models import make_model
from tests.support.fake_device import BLOCK_SIZE, TimedDevice

LIMITS = Limits(num_blocks=400, block_size=16, max_model_len=2000, vocab_size=97, max_rows=32, max_tokens=256)


def seconds(shape: StepShape) -> float:
    return 1e-3 + 1e-5 * shape.num_tokens + 1e-7 * (shape.decode_context + shape.chunk_pairs)


def known_times(slowness: Callable[[int], float] = lambda step: 1.0) -> TimedDevice:
    """Steps take `seconds` of their shape, times how slow the machine is."""
    return TimedDevice(lambda step: seconds(step.shape) * slowness(step.number), num_blocks=400)


@pytest.mark.parametrize("limits", [LIMITS, Limits(20, 16, 64, 97, 3, 40), Limits(1, 16, 16, 97, 1, 8)])
def test_points_fit_the_device(limits: Limits) -> None:
    rng = random.Random(1)
    points = [*edges(limits), *islice(random_points(limits, rng), 300)]
    for point in points:
        rows = rows_of(point, limits, rng)
        blocks = [block_id for row in rows for block_id in row.block_ids]
        assert len(blocks) == len(set(blocks)) <= limits.num_blocks
        for row in rows:
            end = row.num_computed_tokens + len(row.token_ids)
            assert end <= min(limits.max_model_len, len(row.block_ids) * limits.block_size)
        shape = shape_of(rows)
        assert shape.num_decodes <= limits.max_rows
        assert shape.num_decodes == len(point.decodes)
    if limits is LIMITS:
        assert {shape_of(rows_of(point, limits, rng)).regime for point in points} == set(Regime)


def test_both_sides_of_every_edge_are_measured() -> None:
    counts = [shape_of(rows_of(point, LIMITS, random.Random(1))) for point in edges(LIMITS)]
    decodes = {shape.num_decodes for shape in counts if shape.regime is Regime.DECODE}
    prompts = {shape.chunk_tokens for shape in counts if shape.regime is Regime.PREFILL}
    assert decodes == {count for knot in KNOTS for count in (knot, knot + 1) if count <= 32}
    assert prompts == {count for knot in KNOTS for count in (knot, knot + 1) if 1 < count <= 256}


def test_drift_of_the_machine_is_divided_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """It becomes half as fast in the middle of the run."""
    looks = count()  # at a clock, on which as much time passes for each point on every machine
    monkeypatch.setattr("engine.profile.measure.time", SimpleNamespace(monotonic=lambda: 1e-4 * next(looks)))
    device = known_times(lambda step: 2.0 if step > 900 else 1.0)
    limits = Limits(400, BLOCK_SIZE, device.info.max_model_len, 97, 16, 128)
    run = Run(device, limits, seed=1, with_edges=False)
    steps = []
    while device._number < 2000:
        steps += run.measure(0.05, lambda share: None)
    late = [step for step in steps if step.shape.num_tokens][-100:]
    early = steps[:100]
    for some in (early, late):
        ratios = sorted(step.seconds / seconds(step.shape) for step in some)
        assert ratios[len(ratios) // 2] in (pytest.approx(1.0, rel=0.01), pytest.approx(2.0, rel=0.01))
    assert run.noise() == 0.0


def test_the_engine_s_own_steps_are_predicted() -> None:
    device = known_times()
    limits = Limits(400, BLOCK_SIZE, device.info.max_model_len, 97, 16, 128)
    run = Run(device, limits, seed=1, with_edges=True)
    steps = []
    while len(steps) < 400:
        steps += run.measure(0.2, lambda share: None)
    settings = EngineSettings(block_size=BLOCK_SIZE, max_num_seqs=16, chunk_size=128)
    workload = measure_workload(device, settings, seconds=0.5, seed=2)
    assert len(workload) > 20
    assert model_errors(fit(KEY, steps), workload).median < 0.03


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, out = make_model(tmp_path / "llama", {}), tmp_path / "made" / "time.json"
    arguments = ["--num-blocks", "64", "--num-threads", "1", "--max-num-seqs", "4", "--chunk-size", "32"]
    assert main(["profile", "--model", str(model), "--minutes", "0.05", "--out", str(out), *arguments]) == 0
    said = capsys.readouterr().out
    assert f"model of time: {out}" in said
    assert "it only continues its lines" in said
    made = decode(out.read_bytes())
    assert (made.key.device, made.key.num_threads, made.key.quantization) == ("cpu", 1, "none")
    assert made.predict(StepShape(num_decodes=2, decode_context=40, num_head_rows=2)).median > 0
    page = out.with_suffix(".html").read_text()
    assert page.count("<svg") >= 2
    assert "<script" not in page
    assert "http" not in page
