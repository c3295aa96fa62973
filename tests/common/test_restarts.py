"""When a child that ended is started again."""

from __future__ import annotations

from common.process.restarts import MAX_DELAY_S, WINDOW_S, Restarts


def test_delays_double_up_to_a_limit() -> None:
    restarts = Restarts(9)
    assert [restarts.delay_s("a", 0.0) for _ in range(9)] == [
        0.5,
        1,
        2,
        4,
        8,
        16,
        MAX_DELAY_S,
        MAX_DELAY_S,
        MAX_DELAY_S,
    ]
    assert restarts.delay_s("a", 0.0) is None


def test_each_child_has_its_own_number() -> None:
    restarts = Restarts(1)
    assert restarts.delay_s("a", 0.0) == 0.5
    assert restarts.delay_s("b", 0.0) == 0.5
    assert restarts.delay_s("a", 1.0) is None


def test_what_is_long_ago_is_forgotten() -> None:
    restarts = Restarts(2)
    assert [restarts.delay_s("a", now) for now in (0.0, 100.0)] == [0.5, 1.0]
    assert restarts.delay_s("a", WINDOW_S) == 1.0
    assert restarts.delay_s("a", WINDOW_S + 99.0) is None


def test_none_if_none_are_allowed() -> None:
    assert Restarts(0).delay_s("a", 0.0) is None
