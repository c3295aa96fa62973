"""Which request gives its blocks back if blocks run out. Pure."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Literal

from engine.messages import RequestMode
from engine.request import Request


def victim(
    needy: Request, running: Sequence[Request], in_step: Container[Request], policy: Literal["fcfs", "priority"]
) -> Request | None:
    """The request that gives its blocks back for `needy`. Among the requests that are not in this step already: the
    request admitted last or, by priority, the request that would be last in the queue. `needy` itself if there is no
    other request.

    A prefill is never preempted: its decode worker may be reading its blocks, and it needs no more blocks.
    """
    able = [one for one in running if one.mode is not RequestMode.PREFILL]
    victims = [one for one in reversed(able) if one not in in_step]
    if policy == "priority":
        found = max(victims, key=lambda one: one.queue_time, default=None)
    else:
        found = victims[0] if victims else None
    return found or (needy if needy in able else None)
