"""The limit that rows of `bench.engine` are held to: each row's own products, and reading."""

from __future__ import annotations

import pytest
import torch

from bench.engine_systems import Row
from bench.limit import Limit, Machine, best_s, shapes_of

CONFIG = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 100,
}
WEIGHTS = 2 * (128 * 32 + 32 * 64 + 128 * 32 + 32 * 64)
HEAD = 100 * 32


def test_shapes_are_those_of_the_model() -> None:
    shapes = shapes_of(CONFIG)
    assert shapes == [((128, 32), 2), ((32, 64), 2), ((128, 32), 2), ((32, 64), 2), ((100, 32), 1)]
    assert sum(n * k * times for (n, k), times in shapes) == WEIGHTS + HEAD


def test_a_row_is_held_to_the_rate_of_its_own_number_of_tokens() -> None:
    limit = Limit(1e9, 1e9, {8: 0.5, 32: 2.0, 128: 4.0, 512: 8.0})  # reading costs nothing
    for row, rate in ((Row(8, 16, 2), 0.5), (Row(32, 16, 2), 2.0)):
        attention = 2.0 * 2 * 64 * (row.context + 1)
        flop = 2 * row.batch * (WEIGHTS + HEAD + attention) * row.steps
        assert limit.seconds(row, CONFIG, 2) == pytest.approx(flop / rate / 1e9)
    for row, rate in ((Row(1, 128), 4.0), (Row(1, 2048), 8.0)):  # a long prompt goes in chunks
        attention = 2 * 2 * 64 * row.context / 2
        flop = 2 * (row.context * (WEIGHTS + attention) + HEAD)
        assert limit.seconds(row, CONFIG, 2) == pytest.approx(flop / rate / 1e9)


def test_a_prompt_beside_decodes_counts_with_its_own_attention_and_its_head() -> None:
    limit, row = Limit(1e9, 1e9, {24: 2.0}), Row(8, 32, 2, 16)
    attention = 2 * 2 * 2 * 64 * (8 * (32 + 1) + 16 * 16 / 2)
    flop = 2 * (2 * 24 * WEIGHTS + attention + 2 * 9 * HEAD)
    assert row.num_tokens == 48
    assert limit.seconds(row, CONFIG, 2) == pytest.approx(flop / 2.0 / 1e9)


def test_one_token_is_held_to_reading_at_best_and_sustained() -> None:
    limit, row = Limit(20.0, 10.0, {8: 1e-9}), Row(1, 16, 4)
    num_bytes = 2 * (WEIGHTS + HEAD + 16 * 2 * 2 * 2 * 16)
    assert limit.seconds(row, CONFIG, 2) == pytest.approx(4 * num_bytes / 20e9)
    assert limit.sustained().seconds(row, CONFIG, 2) == pytest.approx(4 * num_bytes / 10e9)
    assert limit.or_better(Limit(15.0, 15.0, {8: 3.0})) == Limit(20.0, 15.0, {8: 3.0})


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_row_that_multiplies_is_measured(dtype: str) -> None:
    before = torch.get_num_threads()
    try:
        rows = [Row(1, 600), Row(1, 16, 2), Row(8, 16, 2)]
        limit = Machine(rows, CONFIG, dtype, 1, read_s=0.01, read_shape=(64, 2048)).measure()
    finally:
        torch.set_num_threads(before)
    assert sorted(limit.gflop_s) == [8, 512]
    assert min(limit.gflop_s.values()) > 0
    assert limit.read_gb_s >= limit.sustained_gb_s > 0


def test_the_fastest_way_counts_and_a_hopeless_one_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now, calls = 0.0, {"quick": 0, "slow": 0}

    def work(name: str, seconds: float) -> None:
        nonlocal now
        calls[name] += 1
        now += seconds

    monkeypatch.setattr("time.perf_counter", lambda: now)
    assert best_s([lambda: work("slow", 0.3), lambda: work("quick", 0.1)]) == pytest.approx(0.1)
    assert calls == {"quick": 4, "slow": 2}
