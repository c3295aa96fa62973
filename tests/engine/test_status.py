"""Status calls are cheap, however many requests wait and however often somebody asks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

from engine import messages as m
from engine.core import INTEGRITY_AGE_S, INTEGRITY_SHARE, EngineCore
from tests.engine.fakes import add, make_core


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


def statuses(core: EngineCore, times: int) -> list[str]:
    for call_id in range(times):
        core.handle(m.GetStatus(call_id))
    return [event.integrity for event in core.take_events() if isinstance(event, m.Status)]


def test_many_status_calls_share_a_check() -> None:
    core, _ = make_core()
    now, check_s, num_checks = 1e6, 0.004, 0
    check = core.scheduler.check_integrity

    def counted() -> list[str]:
        nonlocal now, num_checks
        num_checks += 1
        now += check_s
        return check()

    core._clock = lambda: now
    core.scheduler.check_integrity = counted  # type: ignore[method-assign]
    add(core, "a", list(range(9)))
    core.step()
    assert statuses(core, 100) == ["ok"] * 100
    assert num_checks == 1
    core.scheduler.requests["a"].block_ids.pop()
    now += 0.9 * check_s / INTEGRITY_SHARE
    assert statuses(core, 1) == ["ok"]
    now += 0.2 * check_s / INTEGRITY_SHARE
    assert "ref_cnt" in statuses(core, 1)[0]
    assert num_checks == 2
    check_s = 100.0
    now += 1.0
    statuses(core, 1)
    now += INTEGRITY_AGE_S
    statuses(core, 1)
    assert num_checks == 4, "no result is older than that, however long a check takes"
