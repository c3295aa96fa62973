"""Calls of decode workers: many in one stream to each worker, or one at a time of a worker that knows no better.

    DecodeStreams.call ──> DecodeCall ──start, cancel, credit──> _Stream ──> worker
                               ^                                    │
                               └──── its tokens and events <────────┘

The stream is read as fast as it comes, whoever of its calls is read: what nobody has taken yet is bounded for each call
(`common.call_window`), and tokens that wait come together when they are taken. A stream that breaks fails its calls as
a broken connection does, and the next call opens another one.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NoReturn

import grpc
from google.protobuf.message import DecodeError
from google.rpc import code_pb2, status_pb2

from common.call_window import MAX_EVENTS, MAX_TOKENS, TOKEN_COST, WINDOW_BYTES
from common.grpc_options import REQUEST_OTHER_BYTES, REQUEST_TOKEN_BYTES
from common.grpc_status import DETAILS_KEY, Metadata
from common.grpc_streams import MessageStream
from protos.baton.v1 import decode_pb2, decode_pb2_grpc
from protos.convert import finish_reason_of

log = logging.getLogger(__name__)

MAX_OLDER = 1024  # workers that are remembered to have no streams of many calls
MAX_UNREAD_BYTES = 2 * WINDOW_BYTES  # of a call, when more comes: honest workers stop at half of it
MIN_UNREAD_COST = 4  # of an unread event: no honest one has less than half, and workers stop at half of what is allowed
MAX_ENDED_BYTES = 2**14  # of a call's status
START_BYTES = 64  # of a message that starts a call, beside its request
FLOOD = ("INTERNAL", "it sends more than it has credit for")
LATE = ("DEADLINE_EXCEEDED", "the request's deadline has passed")

Arrived = decode_pb2.DecodeEvent | list[int]
"""What came: an event, or tokens of which there is nothing else to say."""


class CallFailedError(Exception):
    """A call ended without success. `code` is the name of a `grpc.StatusCode`; `details` are the worker's words."""

    def __init__(self, code: str, details: str, metadata: Metadata | None = None) -> None:
        super().__init__(f"{code}: {details}")
        self.code = code
        self.details = details
        self.metadata = metadata


class DecodeStreams:
    """Of one router, to all workers."""

    def __init__(self) -> None:
        self._streams: dict[grpc.aio.Channel, _Stream] = {}
        self._older: dict[tuple[str, str], None] = {}  # incarnations that have no streams of many calls

    def call(
        self,
        channel: grpc.aio.Channel,
        incarnation: tuple[str, str],
        request: decode_pb2.DecodeRequest,
        timeout_s: float,
    ) -> DecodeCall | SingleCall:
        """Starts a call, to be closed. `incarnation` is `Endpoint.incarnation`."""
        if incarnation in self._older:
            return SingleCall(channel, request, timeout_s)
        stream = self._streams.get(channel)
        if stream is None:
            stream = self._streams[channel] = _Stream(channel, partial(self._ended, channel, incarnation))
        return stream.call(request, timeout_s)

    def _ended(self, channel: grpc.aio.Channel, incarnation: tuple[str, str], is_unknown: bool) -> None:
        del self._streams[channel]
        if is_unknown:
            log.info(
                "a decode worker of an older version: a stream for each request", extra={"address": incarnation[0]}
            )
            self._older[incarnation] = None
            if len(self._older) > MAX_OLDER:
                del self._older[next(iter(self._older))]


class DecodeCall:
    """One request of a stream: what arrives, in order. Raises `CallFailedError` after what came before the failure."""

    def __init__(self, stream: _Stream, call_id: int, alone: Callable[[], SingleCall]) -> None:
        """`alone`: what takes its place if the worker has no streams of many calls."""
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
        self._wake()

    def put_event(self, data: bytes) -> None:
        if self._num_unread >= MAX_UNREAD_BYTES:
            self._stream.give_up(self._call_id, FLOOD)
            return
        self._num_unread += max(len(data), MIN_UNREAD_COST)
        self._arrived.append(data)
        self._wake()

    def end(self, failure: CallFailedError | None) -> None:
        """Nothing more comes."""
        if not self._has_ended:
            self._has_ended, self._failure = True, failure
            self._stop_timer()
            self._wake()

    def go_alone(self) -> None:
        """The worker knows no streams of many calls."""
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


class _Stream:
    """To one worker, until it breaks or its channel is closed."""

    def __init__(self, channel: grpc.aio.Channel, on_end: Callable[[bool], None]) -> None:
        """`on_end` is told whether the worker knows no such streams."""
        self._channel = channel
        self._rpc = decode_pb2_grpc.DecodeServiceStub(channel).DecodeMany()
        self._on_end = on_end
        self._has_heard = False  # a message: the worker knows such streams
        self._has_ended = False
        self._numbers = itertools.count(1)
        self._calls: dict[int, DecodeCall] = {}
        # What waits to be sent.
        self._starts: dict[int, tuple[decode_pb2.DecodeRequest, float]] = {}  # with its deadline, in the loop's time
        self._cancelled: list[int] = []
        self._credits: dict[int, int] = {}
        self._news: asyncio.Future[None] | None = None  # for the writer
        self._tasks = (asyncio.create_task(self._write()), asyncio.create_task(self._read()))

    def call(self, request: decode_pb2.DecodeRequest, timeout_s: float) -> DecodeCall:
        loop, call_id = asyncio.get_running_loop(), next(self._numbers)
        deadline = loop.time() + timeout_s
        call = DecodeCall(self, call_id, lambda: SingleCall(self._channel, request, max(deadline - loop.time(), 0.0)))
        num_tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
        if request.ByteSize() > REQUEST_TOKEN_BYTES * num_tokens + REQUEST_OTHER_BYTES - START_BYTES:
            # The worker would end the stream for it, and all other calls with it.
            call.end(CallFailedError("RESOURCE_EXHAUSTED", "the request is larger than workers take"))
            return call
        self._calls[call_id] = call
        call.timer = loop.call_later(timeout_s, self.give_up, call_id, LATE)
        self._starts[call_id] = request, deadline
        self._wake()
        return call

    def credit(self, call_id: int, num_bytes: int) -> None:
        self._credits[call_id] = self._credits.get(call_id, 0) + num_bytes
        self._wake()

    def forget(self, call_id: int, *, cancel: bool) -> None:
        self._credits.pop(call_id, None)
        was_sent = self._starts.pop(call_id, None) is None
        if self._calls.pop(call_id, None) is not None and cancel and was_sent:
            self._cancelled.append(call_id)
            self._wake()

    def give_up(self, call_id: int, failure: tuple[str, str]) -> None:
        """The call fails by this end's will, and the worker is told."""
        call = self._calls.get(call_id)
        self.forget(call_id, cancel=True)
        if call is not None:
            call.end(CallFailedError(*failure))

    # ---------------------------------------------------------------------------------------------- to the worker

    def _wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    async def _write(self) -> None:
        try:
            # A write that meets the end of the stream hides how it ended, and an older worker ends it at once.
            await self._rpc.initial_metadata()
            while not self._has_ended:
                if self._starts or self._cancelled or self._credits:
                    await self._rpc.write(self._next_message())
                else:
                    self._news = asyncio.get_running_loop().create_future()
                    await self._news
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, asyncio.CancelledError):
            return  # the stream has ended: its reader is told why

    def _next_message(self) -> decode_pb2.DecodeManyRequest:
        """A start has one of its own: messages have a limit, and one that exceeds it ends all calls."""
        message = decode_pb2.DecodeManyRequest()
        if self._cancelled or self._credits:
            message.cancelled_call_ids.extend(self._cancelled)
            for call_id, num_bytes in self._credits.items():
                message.credits.add(call_id=call_id, num_bytes=num_bytes)
            self._cancelled = []
            self._credits = {}
            return message
        call_id = next(iter(self._starts))
        request, deadline = self._starts.pop(call_id)
        message.start.call_id = call_id
        message.start.timeout_s = max(deadline - asyncio.get_running_loop().time(), 0.0)
        message.start.request.CopyFrom(request)
        return message

    # -------------------------------------------------------------------------------------------- from the worker

    async def _read(self) -> None:
        failure = CallFailedError("UNAVAILABLE", "the worker ended its stream")
        is_unknown = False
        try:
            while isinstance(message := await self._rpc.read(), decode_pb2.DecodeManyResponse):
                self._has_heard = True
                self._take_in(message)
            if message is not grpc.aio.EOF:
                raise _FalseStreamError("sends a message that cannot be read")
        except grpc.aio.AioRpcError as error:
            is_unknown = error.code() is grpc.StatusCode.UNIMPLEMENTED and not self._has_heard
            failure = _failure_of_all(error, has_heard=self._has_heard)
        except _FalseStreamError as error:
            failure = CallFailedError("INTERNAL", f"it {error}")
        except asyncio.CancelledError:  # its channel is closed
            failure = CallFailedError("UNAVAILABLE", "the connection was closed")
        finally:
            self._end(failure, is_unknown=is_unknown)

    def _take_in(self, message: decode_pb2.DecodeManyResponse) -> None:
        """Calls that nobody waits for any more may still be answered."""
        calls, num_tokens = self._calls, len(message.token_ids)
        if num_tokens != len(message.call_ids) or num_tokens > MAX_TOKENS:
            raise _FalseStreamError(f"sends {num_tokens} tokens of {len(message.call_ids)} calls in one message")
        if len(message.events) > MAX_EVENTS:
            raise _FalseStreamError(f"sends {len(message.events)} events in one message")
        for call_id, token_id in zip(message.call_ids, message.token_ids, strict=True):
            if (call := calls.get(call_id)) is not None:
                call.put_token(token_id)
        for event in message.events:
            if (call := calls.get(event.call_id)) is None:
                continue
            if event.HasField("ended"):
                del calls[event.call_id]
                call.end(_failure_of_one(event.ended))
            else:
                call.put_event(event.event)

    def _end(self, failure: CallFailedError, *, is_unknown: bool) -> None:
        self._has_ended = True
        self._rpc.cancel()  # does nothing to one that has ended
        self._wake()
        calls, self._calls = self._calls, {}
        self._on_end(is_unknown)
        for call in calls.values():
            if is_unknown:
                call.go_alone()
            else:
                call.end(CallFailedError(failure.code, failure.details, failure.metadata))


class _FalseStreamError(Exception):
    """The worker said what cannot be."""


def _failure_of_all(error: grpc.aio.AioRpcError, *, has_heard: bool) -> CallFailedError:
    """What the end of their stream means to its calls. However it ended, the worker is to blame, and not a request.
    Only a stream of which nothing was heard can have been refused by a full worker."""
    code, details = error.code().name, error.details() or ""
    if code == "UNAVAILABLE" or (code == "RESOURCE_EXHAUSTED" and not has_heard):
        return CallFailedError(code, details, error.trailing_metadata())
    return CallFailedError("UNAVAILABLE", f"its stream broke with {code}: {details}")


def _failure_of_one(ended: bytes) -> CallFailedError | None:
    """What the worker says of a call's end; None if all went well."""
    try:
        status = status_pb2.Status.FromString(ended if len(ended) <= MAX_ENDED_BYTES else b"?")
        code = code_pb2.Code.Name(status.code)
    except (DecodeError, ValueError):
        return CallFailedError("UNKNOWN", "it sends a status that cannot be read")
    return CallFailedError(code, status.message, ((DETAILS_KEY, ended),)) if status.code else None


def _is_last(event: decode_pb2.DecodeEvent) -> bool:
    return bool(event.finish_reason) and finish_reason_of(event.finish_reason) is not None
