"""The formulas of late requests against what they must be in cases that are known, and against chance itself."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.autoscaler.forecast import Expected
from router.autoscaler.late_shares import DecodeBatch, PrefillQueue, backlog_above
from tests.examples import examples

QUEUE = PrefillQueue(Expected(30_000.0, 0.0, 20_000.0), 1.0, 5000.0, 8000.0, ttft_s=10.0)
BATCH = DecodeBatch(Expected(5.0, 0.0, 1.0), 350.0, 0.015, 0.001, most=20.0)


def test_in_the_long_run_a_backlog_is_exponential() -> None:
    assert backlog_above(300.0, -10.0, 2000.0, 0.0, 1e6) == pytest.approx(math.exp(-2 * 10 * 300 / 2000), rel=1e-3)


def test_without_noise_a_backlog_moves_straight() -> None:
    assert backlog_above(100.0, 10.0, 0.0, 50.0, 4.0) == 0.0
    assert backlog_above(100.0, 10.0, 0.0, 50.0, 6.0) == 1.0
    assert backlog_above(0.0, -10.0, 0.0, 50.0, 6.0) == 0.0


def test_a_backlog_after_a_while_is_what_a_walk_finds() -> None:
    draw = random.Random(1)
    drift, deviation, start, steps = -0.5, 2.0, 10.0, 30

    def walk() -> float:
        at = start
        for _ in range(steps):
            at = max(0.0, at + drift + draw.gauss(0.0, deviation))
        return at

    ends = [walk() for _ in range(3000)]
    for limit in (5.0, 15.0):
        seen = sum(end > limit for end in ends) / len(ends)
        assert backlog_above(limit, drift, deviation**2, start, steps) == pytest.approx(seen, abs=0.06)


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(1, 40), st.floats(0, 1e6), st.floats(0, 20_000))
def test_more_prefill_workers_are_never_later(num: int, queued: float, error: float) -> None:
    queue = replace(QUEUE, tokens=replace(QUEUE.tokens, error=error))
    shares = [queue.late(num + more, queued_tokens=queued, seconds=45.0) for more in (0, 1, 5)]
    assert 1.0 + 1e-6 >= shares[0] >= shares[1] - 1e-9 >= shares[2] - 2e-9 >= -1e-6


def test_a_queue_makes_later_and_is_worked_off() -> None:
    late = [QUEUE.late(5, queued_tokens=queued, seconds=45.0) for queued in (0.0, 200_000.0, 2_000_000.0)]
    assert late[0] < late[1] < late[2]
    assert late[2] == pytest.approx(1.0, abs=0.01)
    assert QUEUE.late(60, queued_tokens=2_000_000.0, seconds=45.0) < 0.01


def test_prompts_that_no_number_of_workers_helps_are_left_out() -> None:
    slow = replace(QUEUE, mean_tokens=200_000.0, squared_variation=0.05)
    assert slow.late(1000, queued_tokens=0.0, seconds=45.0) < 0.01


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(1, 40), st.floats(0, 100), st.floats(0, 10))
def test_more_decode_workers_are_never_slower(num: int, rate: float, error: float) -> None:
    batch = replace(BATCH, requests=Expected(rate, error, 1.5))
    assert batch.late(num) >= batch.late(num + 1) - 1e-9


def test_decode_workers_that_are_full_are_too_slow() -> None:
    """A worker of 20 requests makes 571 tokens a second, in time."""
    assert replace(BATCH, requests=Expected(3.0, 0.0, 1.0)).late(1) == pytest.approx(1.0, abs=1e-4)
    assert replace(BATCH, requests=Expected(0.5, 0.0, 1.0)).late(1) < 0.01
