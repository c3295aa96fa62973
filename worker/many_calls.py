"""Many calls in one gRPC stream: what happens to them at the same moment travels as one message.

    router ──start, cancel, credit──> ManyCalls ──a task for each call──> the request's run
       ^                                 │
       └──── all that waits, as one message, whenever the one before is on its way

A call waits alone if its router leaves too much of it unread (`common.grpc.call_window`): what all calls have on their
way is bounded, and nobody is held up by another one's reader. Whatever ends the stream cancels its calls.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import grpc

from common.errors import DeadlineError, InvalidArgumentError, OverloadedError
from common.grpc.call_window import MAX_EVENTS, MAX_TOKENS, STARTS_KEY, TOKEN_COST, WINDOW_BYTES
from common.grpc.calls import failure_of
from common.grpc.status import rich_status
from common.grpc.streams import uncancelled
from protos.baton.v1 import decode_pb2

Context = grpc.aio.ServicerContext[Any, Any]

BATCH_BYTES = 2**17  # of events in one message, but for the last of them
LONGEST_S = 1e6


class Caller(Protocol):
    """The caller of one request."""

    async def write(self, event: decode_pb2.DecodeEvent, /) -> None:
        """Returns once there is room for more."""

    def take_tokens(self, token_ids: list[int]) -> bool:
        """Sends tokens that need no event of their own, if that is possible without waiting. Returns whether it was."""

    def time_remaining(self) -> float | None:
        """Seconds until the request's deadline; None if it has none."""


class OneCall:
    """The caller of a gRPC call of its own."""

    def __init__(self, context: Context) -> None:
        self.write = context.write
        self.time_remaining = context.time_remaining

    def take_tokens(self, token_ids: list[int]) -> bool:  # noqa: ARG002 (each is a message)
        return False


class Call:
    """One of many, and its caller."""

    def __init__(self, stream: _Stream, call_id: int) -> None:
        self.call_id = call_id
        self.num_events = 0  # that wait to be sent
        self.timer: asyncio.TimerHandle | None = None
        self.is_late = False
        self._stream = stream
        self._left = WINDOW_BYTES  # that may be sent; below 0 after an event that exceeded it
        self._room: asyncio.Future[None] | None = None  # for the task that waits to write

    async def write(self, event: decode_pb2.DecodeEvent, /) -> None:
        data = event.SerializeToString()
        self._left -= len(data)
        self._stream.add(self, data, is_end=False)
        while self._left <= 0 and not event.finish_reason:  # a reader that has the last event may give no more credit
            self._room = asyncio.get_running_loop().create_future()
            await self._room

    def take_tokens(self, token_ids: list[int]) -> bool:
        if self._left <= 0 or self.num_events:
            return False
        self._left -= TOKEN_COST * len(token_ids)
        self._stream.add_tokens(self.call_id, token_ids)
        return True

    def time_remaining(self) -> float | None:
        return None if self.timer is None else self.timer.when() - asyncio.get_running_loop().time()

    def credit(self, num_bytes: int) -> None:
        self._left = min(self._left + num_bytes, WINDOW_BYTES)
        if self._left > 0 and self._room is not None and not self._room.done():
            self._room.set_result(None)


Run = Callable[[decode_pb2.DecodeRequest, Call], Awaitable[None]]
"""One request to its end. What it raises becomes the call's status."""


class ManyCalls:
    """The calls of all streams of a server."""

    def __init__(self, run: Run, max_calls: int) -> None:
        """`max_calls`: at a time; further ones are refused."""
        self.run = run
        self.max_calls = max_calls
        self.num_calls = 0

    async def serve(self, context: Context) -> None:
        """One stream, until its router ends it. Raises `InvalidArgumentError` for what no router sends."""
        await context.send_initial_metadata(((STARTS_KEY, "1"),))  # routers wait for it
        stream = _Stream(self, context)
        tasks = [asyncio.create_task(stream.read()), asyncio.create_task(stream.write())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            stream.end()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


class _Stream:
    def __init__(self, calls: ManyCalls, context: Context) -> None:
        self._calls = calls
        self._context = context
        self._running: dict[int, tuple[Call, asyncio.Task[None]]] = {}
        self._last_id = -1
        self._call_ids: list[int] = []  # of the tokens that wait to be sent
        self._token_ids: list[int] = []
        self._events: deque[tuple[Call, bytes, bool]] = deque()  # that wait to be sent; the third: whether it is an end
        self._num_unsent_ends = 0
        self._num_unsent_bytes = 0
        self._news: asyncio.Future[None] | None = None  # for the writer

    # ------------------------------------------------------------------------------------------ from the router

    async def read(self) -> None:
        most_bytes = self._calls.max_calls * WINDOW_BYTES
        while (message := await uncancelled(self._context.read())) is not grpc.aio.EOF:
            # The router gives credit or cancels calls, but does not read. A router that keeps the rules never leaves
            # more unread than its windows allow.
            if self._num_unsent_bytes > most_bytes:
                raise OverloadedError(f"{self._num_unsent_bytes} bytes of the stream are unread")
            for start in message.starts:
                self._start(start)
            for credit in message.credits:
                if (found := self._running.get(credit.call_id)) is not None:
                    found[0].credit(credit.num_bytes)
            for call_id in message.cancelled_call_ids:
                if (found := self._running.get(call_id)) is not None:
                    found[1].cancel()

    def _start(self, start: decode_pb2.StartCall) -> None:
        if start.call_id <= self._last_id:
            raise InvalidArgumentError("starts.call_id", f"must be above {self._last_id}, not {start.call_id}")
        if self._num_unsent_ends >= self._calls.max_calls:
            raise OverloadedError(f"the ends of {self._num_unsent_ends} calls of the stream are unread")
        self._last_id = start.call_id
        call = Call(self, start.call_id)
        self._calls.num_calls += 1
        is_one_too_many = self._calls.num_calls > self._calls.max_calls
        task = asyncio.create_task(self._run(call, start, is_one_too_many))
        self._running[call.call_id] = call, task
        task.add_done_callback(lambda task: self._ended(call, task))
        if start.HasField("timeout_s") and start.timeout_s >= 0:

            def expire() -> None:
                call.is_late = True
                task.cancel()

            call.timer = asyncio.get_running_loop().call_later(min(start.timeout_s, LONGEST_S), expire)

    async def _run(self, call: Call, start: decode_pb2.StartCall, is_one_too_many: bool) -> None:
        if start.HasField("timeout_s") and not (math.isfinite(start.timeout_s) and start.timeout_s >= 0):
            raise InvalidArgumentError("starts.timeout_s", "must be a number of seconds, 0 at least")
        if is_one_too_many:
            raise OverloadedError(f"the worker has {self._calls.max_calls} calls in hand")
        await self._calls.run(start.request, call)

    def _ended(self, call: Call, task: asyncio.Task[None]) -> None:
        del self._running[call.call_id]
        self._calls.num_calls -= 1
        if call.timer is not None:
            call.timer.cancel()
        status = b""
        if task.cancelled():
            if not call.is_late:
                return
            status = rich_status(DeadlineError("the request's deadline has passed")).SerializeToString()
        elif isinstance(error := task.exception(), Exception):  # no other kind ends a task and not the process
            status = rich_status(failure_of(error).without_stack()).SerializeToString()
        self.add(call, status, is_end=True)

    def end(self) -> None:
        for _, task in self._running.values():
            task.cancel()

    # -------------------------------------------------------------------------------------------- to the router

    def add_tokens(self, call_id: int, token_ids: list[int]) -> None:
        self._call_ids += [call_id] * len(token_ids)
        self._token_ids += token_ids
        self._num_unsent_bytes += TOKEN_COST * len(token_ids)
        self._wake()

    def add(self, call: Call, data: bytes, *, is_end: bool) -> None:
        self._events.append((call, data, is_end))
        call.num_events += 1
        self._num_unsent_ends += is_end
        self._num_unsent_bytes += len(data)
        self._wake()

    def _wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    async def write(self) -> None:
        while True:
            while not self._token_ids and not self._events:
                self._news = asyncio.get_running_loop().create_future()
                await self._news
                await asyncio.sleep(0)  # a call that sent its last event ends now, and both go together
            await self._context.write(self._next_message())

    def _next_message(self) -> decode_pb2.DecodeManyResponse:
        """The next message: as much of what waits as fits into one."""
        call_ids, self._call_ids = self._call_ids[:MAX_TOKENS], self._call_ids[MAX_TOKENS:]
        token_ids, self._token_ids = self._token_ids[:MAX_TOKENS], self._token_ids[MAX_TOKENS:]
        message = decode_pb2.DecodeManyResponse(call_ids=call_ids, token_ids=token_ids)
        num_bytes = 0
        while self._events and not self._token_ids:  # after the tokens that came before
            if num_bytes >= BATCH_BYTES or len(message.events) >= MAX_EVENTS:
                break
            call, data, is_end = self._events.popleft()
            call.num_events -= 1
            num_bytes += len(data)
            if is_end:
                self._num_unsent_ends -= 1
                message.events.add(call_id=call.call_id, ended=data)
            else:
                message.events.add(call_id=call.call_id, event=data)
        self._num_unsent_bytes -= TOKEN_COST * len(token_ids) + num_bytes
        return message
