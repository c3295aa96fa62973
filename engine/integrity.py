"""Whether every request stands in one place, and every block belongs to somebody."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from engine.blocks.block_manager import BlockManager
from engine.remote_kv import WaitingRoom
from engine.request import Request, RequestStatus

CHECK_SHARE = 0.05  # most of the engine's time that checks may take
MAX_AGE_S = 1.0  # of a result that is told again


def problems(
    requests: Mapping[str, Request], queued: Sequence[Request], room: WaitingRoom, blocks: BlockManager
) -> list[str]:
    """What is wrong; empty if every block is free, cached or owned by a live request. `queued`: the waiting or running
    requests of each queue."""
    found = blocks.check_integrity(requests.values())
    num_queued = Counter(map(id, queued))
    for request in requests.values():
        num_places = num_queued[id(request)] + (request in room)
        if num_places != (request.status is not RequestStatus.FINISHED_LEASED):
            found.append(f"request {request.request_id} ({request.status}) is in {num_places} queues")
        if request.status is RequestStatus.WAITING and request.block_ids:
            found.append(f"request {request.request_id} waits with blocks")
    known = set(map(id, requests.values()))
    found += [f"request {one.request_id} is queued, but unknown" for one in queued if id(one) not in known]
    return found + room.check_integrity(requests)


class IntegrityReport:
    """A check takes time in proportion to blocks and requests, and anybody may ask for it. So the last result is told
    again until the check took no more than `CHECK_SHARE` of the time since then."""

    def __init__(self, check: Callable[[], list[str]], clock: Callable[[], float]) -> None:
        self._check = check
        self._clock = clock
        self._result = ""
        self._due = 0.0

    def get(self) -> str:
        """What is wrong, or "ok"."""
        start = self._clock()
        if start >= self._due:
            self._result = "; ".join(self._check()[:5]) or "ok"
            end = self._clock()
            self._due = end + min((end - start) / CHECK_SHARE, MAX_AGE_S)
        return self._result
