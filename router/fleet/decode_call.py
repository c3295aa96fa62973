"""One request on a decode worker, as its router sees it: in a stream of many (`decode_stream`), or in one of its own.

What arrives for a call waits until the call's reader takes it, independent of other calls of the stream. It is bounded
(`common.grpc.call_window`), and tokens that wait are given together.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import NoReturn, Protocol

import grpc
from google.protobuf.message import DecodeError

from common.grpc.call_window import TOKEN_COST, WINDOW_BYTES
from common.grpc.status import Metadata
from common.grpc.streams import MessageStream
from protos.baton.v1 import decode_pb2, decode_pb2_grpc
from protos.convert import finish_reason_of

MAX_UNREAD_BYTES = 2 * WINDOW_BYTES  # of a call, when more comes: honest workers stop at half of it
MIN_UNREAD_COST = 4  # of an unread event: no honest one has less than half, and workers stop at half of what is allowed
FLOOD = ("INTERNAL", "it sends more than it has credit for")

Arrived = decode_pb2.DecodeEvent | list[int]
"""What came: an event, or tokens of which there is nothing else to say."""


class CallFailedError(Exception):
    """A call ended without success. `code` is the name of a `grpc.StatusCode`; `details` are the worker's words."""

    def __init__(self, code: str, details: str, metadata: Metadata | None = None) -> None:
        super().__init__(f"{code}: {details}")
        self.code = code
        self.details = details
        self.metadata = metadata


class Stream(Protocol):
    """What carries many calls."""

    def credit(self, call_id: int, num_bytes: int) -> None:
        """The call's reader took `num_bytes`, so the worker may send as many more."""

    def forget(self, call_id: int, *, cancel: bool) -> None:
        """Nobody waits for the call any more. With `cancel`, the worker is told."""

    def give_up(self, call_id: int, failure: tuple[str, str]) -> None:
        """Fails the call at this end, and tells the worker."""


class DecodeCall:
    """One request of a stream: what arrives, in order. Raises `CallFailedError` after what came before the failure."""

    def __init__(self, stream: Stream, call_id: int, alone: Callable[[], SingleCall]) -> None:
        """`alone`: a call in a stream of its own, used if the worker knows no streams of many calls."""
        self.timer: asyncio.TimerHandle | None = None
        self._stream = stream
        self._call_id = call_id
        self._alone: Callable[[], SingleCall] | None = alone
        self._single: SingleCall | None = None
        self._arrived: deque[list[int] | bytes] = deque()  # tokens, or an event
        self._num_unread = 0  # bytes, as workers count them; but tiny events cost more
        self._num_read = 0  # bytes that the worker has no credit for yet
        self._has_ended = self._ends_by_itself = self._goes_alone = False
        self._failure: CallFailedError | None = None
        self._news: asyncio.Future[None] | None = None

    def __aiter__(self) -> DecodeCall:
        return self

    async def __anext__(self) -> Arrived:
        while not self._arrived:
            if self._goes_alone:
                return await self._next_alone()
            if self._has_ended:
                self._raise_end()
            self._news = asyncio.get_running_loop().create_future()
            await self._news
        data = self._arrived.popleft()
        self._alone = None  # it holds the request
        if isinstance(data, bytes):
            self._num_unread -= max(len(data), MIN_UNREAD_COST)
            self._num_read += len(data)
        else:
            self._num_unread -= TOKEN_COST * len(data)
            self._num_read += TOKEN_COST * len(data)
        if self._num_read >= WINDOW_BYTES // 2 and not self._has_ended:
            self._stream.credit(self._call_id, self._num_read)
            self._num_read = 0
        return self._event(data) if isinstance(data, bytes) else data

    async def _next_alone(self) -> Arrived:
        if self._single is None:
            assert self._alone is not None  # noqa: S101 - nothing has arrived
            self._single, self._alone = self._alone(), None
        return await anext(self._single)

    def _event(self, data: bytes) -> decode_pb2.DecodeEvent:
        try:
            event = decode_pb2.DecodeEvent.FromString(data)
        except DecodeError:
            raise CallFailedError("INTERNAL", "it sends an event that cannot be read") from None
        self._ends_by_itself = _is_last(event)
        return event

    def _raise_end(self) -> NoReturn:
        failure, self._failure = self._failure, None
        if failure is None:
            raise StopAsyncIteration
        try:
            raise failure
        finally:
            del failure  # its stack holds this frame

    def put_token(self, token_id: int) -> None:
        if self._num_unread >= MAX_UNREAD_BYTES:
            self._stream.give_up(self._call_id, FLOOD)
            return
        self._num_unread += TOKEN_COST
        if self._arrived and isinstance(last := self._arrived[-1], list):
            last.append(token_id)
        else:
            self._arrived.append([token_id])
        if (news := self._news) is not None and not news.done():  # as `_wake`, for every token
            news.set_result(None)

    def put_event(self, data: bytes) -> None:
        if self._num_unread >= MAX_UNREAD_BYTES:
            self._stream.give_up(self._call_id, FLOOD)
            return
        self._num_unread += max(len(data), MIN_UNREAD_COST)
        self._arrived.append(data)
        self._wake()

    def end(self, failure: CallFailedError | None) -> None:
        """Ends the call: nothing more comes."""
        if not self._has_ended:
            self._has_ended, self._failure = True, failure
            self._stop_timer()
            self._wake()

    def go_alone(self) -> None:
        """Uses the call in a stream of its own, since the worker knows no streams of many calls."""
        self._goes_alone = True
        self._stop_timer()
        self._wake()

    def _stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def _wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    async def aclose(self) -> None:
        """Ends the call on the worker, unless it ended there."""
        if self._single is not None:
            await self._single.aclose()
        is_over = self._has_ended or self._ends_by_itself
        self.end(None)
        self._stream.forget(self._call_id, cancel=not is_over)


class SingleCall:
    """The same in a gRPC stream of its own, for a worker of the release before."""

    def __init__(self, channel: grpc.aio.Channel, request: decode_pb2.DecodeRequest, timeout_s: float) -> None:
        call = decode_pb2_grpc.DecodeServiceStub(channel).Decode(request, timeout=timeout_s)
        self._messages = MessageStream(call, decode_pb2.DecodeEvent, _is_last)

    def __aiter__(self) -> SingleCall:
        return self

    async def __anext__(self) -> Arrived:
        try:
            return await anext(self._messages)
        except grpc.aio.AioRpcError as error:
            raise CallFailedError(error.code().name, error.details() or "", error.trailing_metadata()) from None

    async def aclose(self) -> None:
        await self._messages.aclose()


def _is_last(event: decode_pb2.DecodeEvent) -> bool:
    return bool(event.finish_reason) and finish_reason_of(event.finish_reason) is not None
