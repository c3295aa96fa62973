"""Messages to one decode worker that wait to be sent: starts of calls, cancellations, credit.

Everything that was added while a message was on its way goes into the next one, up to BATCH_BYTES of starts. So many
requests that come at one moment cost the router and the worker one message. A larger start has a message of its own. So
has each start for a worker of an older version, which would take several for one (`takes_batches`).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

from protos.baton.v1 import decode_pb2

BATCH_BYTES = 2**16  # of starts in one message, but for one that is larger alone: a worker takes 2**18, and more
MAX_IDS = 2**12  # cancelled, and credited, in one message: some 2**17 bytes with the credit
START_BYTES = 64  # of a start, beside its request


@dataclass(slots=True, frozen=True)
class _Start:
    request: decode_pb2.DecodeRequest
    num_bytes: int
    deadline: float


class CallOutbox:
    def __init__(self) -> None:
        self.takes_batches = False  # until the worker says that it does
        self._starts: dict[int, _Start] = {}  # in the order of their ids, which go up
        self._cancelled: list[int] = []
        self._credits: dict[int, int] = {}

    def __bool__(self) -> bool:
        return bool(self._starts or self._cancelled or self._credits)

    def start(self, call_id: int, request: decode_pb2.DecodeRequest, num_bytes: int, deadline: float) -> None:
        """`num_bytes` are the request's. `deadline` in the time of `next_message`."""
        self._starts[call_id] = _Start(request, num_bytes + START_BYTES, deadline)

    def credit(self, call_id: int, num_bytes: int) -> None:
        self._credits[call_id] = self._credits.get(call_id, 0) + num_bytes

    def forget(self, call_id: int, *, cancel: bool) -> None:
        """The call is over at this end. With `cancel`, the worker is told, unless it was never told of the call."""
        self._credits.pop(call_id, None)
        if self._starts.pop(call_id, None) is None and cancel:
            self._cancelled.append(call_id)

    def next_message(self, now: float) -> decode_pb2.DecodeManyRequest:
        """The next message: as much of what waits as fits into one."""
        message = decode_pb2.DecodeManyRequest(cancelled_call_ids=self._cancelled[:MAX_IDS])
        del self._cancelled[:MAX_IDS]
        for call_id in [*islice(self._credits, MAX_IDS)]:
            message.credits.add(call_id=call_id, num_bytes=self._credits.pop(call_id))
        is_empty = not (message.cancelled_call_ids or message.credits)
        room = BATCH_BYTES if self.takes_batches else 0
        while self._starts:
            call_id, start = next(iter(self._starts.items()))
            room -= start.num_bytes
            if room < 0 and not is_empty:
                break
            del self._starts[call_id]
            timeout_s = max(start.deadline - now, 0.0)
            message.starts.add(call_id=call_id, timeout_s=timeout_s, request=start.request)
            is_empty = False
        return message
