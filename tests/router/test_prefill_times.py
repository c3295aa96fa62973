"""When a prefill worker is late."""

from __future__ import annotations

import pytest

from router.serving.prefill_times import FIXED_TOKENS, LATE_FACTOR, MIN_LATE_S, MIN_PROMPTS, WINDOW, PrefillTimes

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
