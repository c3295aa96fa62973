"""One request's stream of events from the engine process, with a bound on what its caller leaves unread."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

from common import metrics
from common.errors import SlowReaderError
from engine import messages as m

log = logging.getLogger(__name__)

MAX_UNREAD_EVENTS = 2048  # of one request; before that, gRPC has taken megabytes of them


class Engine(Protocol):
    """What a stream needs of `EngineClient`."""

    def send(self, *commands: m.Command) -> None: ...
    def release(self, engine_id: str) -> None: ...
    def end_loan(self, engine_id: str, request_id: str, after_s: float) -> None: ...


@dataclass(slots=True, frozen=True)
class HandoverDue:
    """An event of the worker itself, not of its engine: the worker drains, and this request should go on elsewhere."""


RequestEvent = (
    HandoverDue
    | m.RemotePrefillNeeded
    | m.LoanNeeded
    | m.BlocksPublished
    | m.BlocksFetched
    | m.PrefillReceived
    | m.TokensGenerated
    | m.StepTraced
    | m.PromptScored
    | m.Embedded
    | m.RequestFailed
)


class EngineStream:
    """One request's events, in order, and a way to add events of one's own among them."""

    def __init__(self, engine: Engine, request_id: str, engine_id: str, num_tokens: int) -> None:
        self.request_id = request_id
        self.engine_id = engine_id
        self.num_waiting_tokens = num_tokens  # 0 once the engine has begun with the request
        self.keep_s = 0.0  # for so long the engine keeps a prefill's published blocks after `EngineClient.open` is left
        self._engine = engine
        self._events: asyncio.Queue[RequestEvent] = asyncio.Queue()
        self._delivery: asyncio.Timeout | None = None  # of what is being written to the caller
        self._is_unread = False
        self._is_awaited = False  # a task waits in `next`, and has acted on all events before
        self.pass_on: Callable[[m.TokensGenerated], bool] | None = None
        """Gets tokens the moment they come, if no earlier event is left, which saves the cost of `next`. Returns
        whether it took them."""

    def send(self, *commands: m.Command) -> None:
        """Sends commands, together; their `request_id` should be `engine_id`."""
        self._engine.send(*commands)

    def release(self) -> None:
        """Ends the request in the engine, whatever its state. Leaving `EngineClient.open` does it too."""
        self._engine.release(self.engine_id)

    def end_loan(self, after_s: float) -> None:
        """Ends the request's loan after `after_s`, even if `EngineClient.open` has been left by then."""
        self._engine.end_loan(self.engine_id, self.request_id, after_s)

    def put(self, event: RequestEvent) -> None:
        if self._is_unread:
            return
        is_next = self._is_awaited and self._events.empty()
        if is_next and self.pass_on is not None and type(event) is m.TokensGenerated and self.pass_on(event):
            return
        if self._events.qsize() >= MAX_UNREAD_EVENTS:
            self._give_up()
        else:
            self._events.put_nowait(event)

    async def deliver(self, writing: Coroutine[Any, Any, None]) -> None:
        """Writes something to the caller. Raises `SlowReaderError` if too many events have come or come while it waits
        to be read: the caller is too slow."""
        if self._is_unread:
            writing.close()  # gRPC could not end a call whose first write began and was cancelled
            raise SlowReaderError(_unread())
        self._delivery = asyncio.timeout(None)
        try:
            async with self._delivery:
                await writing
        except TimeoutError:
            if not self._is_unread:
                raise
            raise SlowReaderError(_unread()) from None
        finally:
            self._delivery = None

    def _give_up(self) -> None:
        """Ends this request, here and in the engine, without effect on others."""
        metrics.worker_streams_unread.inc()
        extra = {"request_id": self.request_id, "num_events": self._events.qsize()}
        log.warning("the caller does not read its stream: the request ends", extra=extra)
        self._is_unread = True
        self._events = asyncio.Queue()
        self._events.put_nowait(m.RequestFailed(self.engine_id, SlowReaderError.grpc_code, _unread()))
        if not self.keep_s:
            self.release()
        if self._delivery is not None:
            self._delivery.reschedule(asyncio.get_running_loop().time())

    async def next(self) -> RequestEvent:
        self._is_awaited = True
        try:
            return await self._events.get()
        finally:
            self._is_awaited = False

    async def next_all(self) -> deque[RequestEvent]:
        """All events that there are, at least one: what the engine gave at the same moment comes together."""
        events = deque([await self._events.get()])
        while not self._events.empty():
            events.append(self._events.get_nowait())
        return events


def _unread() -> str:
    return f"the caller left {MAX_UNREAD_EVENTS} events of its stream unread"
