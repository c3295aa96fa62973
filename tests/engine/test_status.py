"""Status calls are cheap, however many requests wait and however often somebody asks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

from engine.integrity import CHECK_SHARE, MAX_AGE_S, IntegrityReport
from tests.support.fake_device import add, make_core


def num_lines_run(function: Callable[[], object]) -> int:
    """Lines of Python that `function` runs, each turn of a loop or comprehension counted."""
    count = 0

    def trace(frame: FrameType, event: str, arg: object) -> object:
        nonlocal count
        count += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)  # type: ignore[arg-type] # typeshed wants the recursive type
    try:
        function()
    finally:
        sys.settrace(before)
    return count


def test_an_integrity_check_is_linear_in_waiting_requests() -> None:
    core, _ = make_core(num_blocks=8, max_num_seqs=1)
    costs: list[int] = []
    for number in range(400):
        add(core, str(number), [number % 90, 1, 2])
        if number in (199, 399):
            costs.append(num_lines_run(core.scheduler.check_integrity))
    assert costs[1] <= 2.5 * costs[0], "it would be four times as many if each request looked at each"


def test_many_status_calls_share_a_check() -> None:
    now, check_s, num_checks = 1e6, 0.004, 0
    problems: list[str] = []

    def check() -> list[str]:
        nonlocal now, num_checks
        num_checks += 1
        now += check_s
        return problems

    report = IntegrityReport(check, lambda: now)
    assert [report.get() for _ in range(100)] == ["ok"] * 100
    assert num_checks == 1
    problems.append("block 1 has no owner")
    now += 0.9 * check_s / CHECK_SHARE
    assert report.get() == "ok"
    now += 0.2 * check_s / CHECK_SHARE
    assert report.get() == "block 1 has no owner"
    assert num_checks == 2
    check_s = 100.0
    now += 1.0
    report.get()
    now += MAX_AGE_S
    report.get()
    assert num_checks == 4, "no result is older than that, however long a check takes"
