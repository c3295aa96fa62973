"""Streams to decode workers, each of which carries all calls of this router to one worker.

    DecodeStreams.call ──> DecodeCall ──start, cancel, credit──> _Stream ──> worker
                               ^                                    │
                               └──── its tokens and events <────────┘

The stream is read as fast as messages come, even if the readers of some calls are slow. If a stream breaks, its calls
fail as with a broken connection, and the next call opens another stream. A worker that knows no such streams gets one
stream for each call.

Messages to the worker start calls, cancel them, and give credit. Everything that was added while a message was on its
way goes into the next one, up to BATCH_BYTES of starts. So many requests that come at one moment cost the router and
the worker one message. A larger start has a message of its own. So has each start for a worker of an older version,
which would take several for one (`takes_batches`).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import islice

import grpc
from google.protobuf.message import DecodeError
from google.rpc import code_pb2, status_pb2

from common.grpc.call_window import MAX_EVENTS, MAX_TOKENS, STARTS_KEY
from common.grpc.options import REQUEST_OTHER_BYTES, REQUEST_TOKEN_BYTES
from common.grpc.status import DETAILS_KEY
from common.grpc.streams import end_call
from protos.baton.v1 import decode_pb2, decode_pb2_grpc
from router.fleet.decode_call import CallFailedError, DecodeCall, SingleCall

log = logging.getLogger(__name__)

MAX_OLDER = 1024  # workers that are remembered to have no streams of many calls
MAX_ENDED_BYTES = 2**14  # of a call's status
BATCH_BYTES = 2**16  # of starts in one message, but for one that is larger alone: a worker takes 2**18, and more
MAX_IDS = 2**12  # cancelled, and credited, in one message: some 2**17 bytes with the credit
START_BYTES = 64  # of a start, beside its request
LATE = ("DEADLINE_EXCEEDED", "the request's deadline has passed")


class DecodeStreams:
    """The streams of many calls from one router to all its workers."""

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
        """Starts a call, which the caller has to close. `incarnation` is `Endpoint.incarnation`."""
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


class _Stream:
    """The stream to one worker, until it breaks or its channel is closed."""

    def __init__(self, channel: grpc.aio.Channel, on_end: Callable[[bool], None]) -> None:
        """`on_end` is told whether the worker knows no such streams."""
        self._channel = channel
        self._rpc = decode_pb2_grpc.DecodeServiceStub(channel).DecodeMany()
        self._on_end = on_end
        self._has_heard = False  # a message: the worker knows such streams
        self._has_ended = False
        self._numbers = itertools.count(1)
        self._calls: dict[int, DecodeCall] = {}
        self._outbox = CallOutbox()
        self._news: asyncio.Future[None] | None = None  # for the writer
        self._tasks = (asyncio.create_task(self._write()), asyncio.create_task(self._read()))

    def call(self, request: decode_pb2.DecodeRequest, timeout_s: float) -> DecodeCall:
        loop, call_id = asyncio.get_running_loop(), next(self._numbers)
        deadline = loop.time() + timeout_s
        call = DecodeCall(self, call_id, lambda: SingleCall(self._channel, request, max(deadline - loop.time(), 0.0)))
        num_tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
        num_bytes = request.ByteSize()
        if num_bytes > REQUEST_TOKEN_BYTES * num_tokens + REQUEST_OTHER_BYTES - START_BYTES:
            # For such a request the worker would end the stream, and with it all other calls.
            call.end(CallFailedError("INVALID_ARGUMENT", "the request is larger than any worker takes"))
            return call
        self._calls[call_id] = call
        call.timer = loop.call_later(timeout_s, self.give_up, call_id, LATE)
        self._outbox.start(call_id, request, num_bytes, deadline)
        self._wake()
        return call

    def credit(self, call_id: int, num_bytes: int) -> None:
        self._outbox.credit(call_id, num_bytes)
        self._wake()

    def forget(self, call_id: int, *, cancel: bool) -> None:
        is_known = self._calls.pop(call_id, None) is not None
        self._outbox.forget(call_id, cancel=cancel and is_known)
        if cancel:
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
        loop, outbox = asyncio.get_running_loop(), self._outbox
        try:
            # A write that meets the end of the stream hides how it ended, and an older worker ends it at once.
            outbox.takes_batches = (await self._rpc.initial_metadata()).get(STARTS_KEY) is not None
            while not self._has_ended:
                if outbox:
                    await self._rpc.write(outbox.next_message(loop.time()))
                else:
                    self._news = loop.create_future()
                    await self._news
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, asyncio.CancelledError):
            return  # the stream has ended: its reader is told why
        except Exception:
            # Its calls would wait for their deadlines, and so would all later ones. The reader ends them.
            log.exception("a stream to a decode worker cannot be written to, and is ended")
            self._rpc.cancel()

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
            await end_call(self._rpc)

    def _take_in(self, message: decode_pb2.DecodeManyResponse) -> None:
        """Takes in one message. Ignores answers to calls that nobody waits for any more."""
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


@dataclass(slots=True, frozen=True)
class _Start:
    request: decode_pb2.DecodeRequest
    num_bytes: int
    deadline: float


class CallOutbox:
    """Messages to one decode worker that wait to be sent."""

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


class _FalseStreamError(Exception):
    """The worker said what cannot be."""


def _failure_of_all(error: grpc.aio.AioRpcError, *, has_heard: bool) -> CallFailedError:
    """The failure of all calls of a stream that ended. The worker is to blame, however the stream ended, and not a
    request. Only a stream on which no message came can have been refused by a full worker."""
    code, details = error.code().name, error.details() or ""
    if code == "UNAVAILABLE" or (code == "RESOURCE_EXHAUSTED" and not has_heard):
        return CallFailedError(code, details, error.trailing_metadata())
    return CallFailedError("UNAVAILABLE", f"its stream broke with {code}: {details}")


def _failure_of_one(ended: bytes) -> CallFailedError | None:
    """The failure of one call, as the worker reports it; None if the call went well."""
    try:
        status = status_pb2.Status.FromString(ended if len(ended) <= MAX_ENDED_BYTES else b"?")
        code = code_pb2.Code.Name(status.code)
    except (DecodeError, ValueError):
        return CallFailedError("UNKNOWN", "it sends a status that cannot be read")
    return CallFailedError(code, status.message, ((DETAILS_KEY, ended),)) if status.code else None
