"""When a prefill worker is late, and when a prompt took long."""

from __future__ import annotations

import pytest

from router.running.prefill_times import (
    FIXED_TOKENS,
    LATE_FACTOR,
    MIN_LATE_S,
    MIN_LIKE,
    MIN_PROMPTS,
    WINDOW,
    LikePrompts,
    PrefillTimes,
)

COST = 1000.0


def after(*elapsed_s: float, cost: float = COST) -> PrefillTimes:
    times = PrefillTimes()
    for one in elapsed_s:
        times.came(cost, one)
    return times


def test_nobody_is_late_before_enough_is_known() -> None:
    times = after(*[1.0] * (MIN_PROMPTS - 1))
    assert times.late_s(COST) is None
    times.came(COST, 1.0)
    assert times.late_s(COST) == pytest.approx(LATE_FACTOR * 1.0)


def test_who_has_more_to_do_may_take_longer() -> None:
    late_s = after(*[1.0] * MIN_PROMPTS).late_s(2 * COST + FIXED_TOKENS)
    assert late_s == pytest.approx(2 * LATE_FACTOR * 1.0)


def test_a_few_slow_ones_are_not_what_is_usual_and_many_are() -> None:
    few, many = after(*[1.0] * 97, *[60.0] * 3), after(*[1.0] * 80, *[60.0] * 20)
    assert few.late_s(COST) == pytest.approx(LATE_FACTOR * 1.0)
    assert many.late_s(COST) == pytest.approx(LATE_FACTOR * 60.0)


def test_what_was_usual_long_ago_counts_no_more() -> None:
    assert after(*[60.0] * WINDOW, *[1.0] * WINDOW).late_s(COST) == pytest.approx(LATE_FACTOR * 1.0)


def test_nobody_is_late_at_once() -> None:
    assert after(*[0.0] * MIN_PROMPTS).late_s(COST) == MIN_LATE_S


def test_prompts_are_compared_with_those_of_their_size() -> None:
    prompts = LikePrompts()
    for _ in range(MIN_LIKE - 1):
        assert prompts.times_usual(100, 100, 0.2) is None, "nobody knows yet"
    assert prompts.times_usual(100, 100, 0.2) == 1
    for _ in range(MIN_LIKE):
        prompts.times_usual(2000, 2000, 20.0)  # ten times the time for a token of a short one
    assert prompts.times_usual(1900, 1900, 19.0) == 1
    assert prompts.times_usual(1900, 1900, 76.0) == pytest.approx(4)
    assert prompts.times_usual(100, 8000, 9.0) is None, "few tokens after a long prefix are another size"
    assert prompts.times_usual(100, 100, 0.24) == 1, "some milliseconds say nothing"
