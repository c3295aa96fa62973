"""Which request gives its blocks back if blocks run out. Pure."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Literal

from engine.messages import RequestMode
from engine.request import Request


def victim(
    needy: Request,
    running: Sequence[Request],
    in_step: Container[Request],
    policy: Literal["auto", "fcfs", "priority", "slo"],
) -> Request | None:
    """The request that gives its blocks back for `needy`. Among the requests that are not in this step already: the
    request admitted last; by priority, the request that would be last in the queue; by slack, the request that has the
    most. `needy` itself if there is no other request.

    A prefill is never preempted: its decode worker may be reading its blocks, and it needs no more blocks.
    """
    able = [one for one in running if one.mode is not RequestMode.PREFILL]
    victims = [one for one in reversed(able) if one not in in_step]
    if policy == "priority":
        found = max(victims, key=lambda one: one.queue_time, default=None)
    elif policy == "slo":
        found = max(victims, key=_slack, default=None)
    else:
        found = victims[0] if victims else None
    return found or (needy if needy in able else None)


def _slack(request: Request) -> tuple[bool, float]:
    """Orders requests by slack: best effort, the latest first, has more than any with targets."""
    pace = request.pace
    if pace is None or (pace.since is not None and pace.tpot_s is None) or (pace.since is None and not pace.has_target):
        return True, request.queue_time
    return False, pace.due if pace.since is None else pace.next_due
