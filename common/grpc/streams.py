"""Reading streams of responses without leaving memory behind.

grpcio never frees what it took for a batch of operations that failed, or whose awaiter was cancelled
(https://github.com/grpc/grpc/issues/43360, seen with 1.69 to 1.85): up to a KiB for each call that is cancelled while
it waits for a message, scattered over the heap, for good. So nothing here cancels a read that has begun: the call is
cancelled instead, and its read then ends by itself. A call whose last message has come is left to end by itself:
cancelling it would often interrupt the server while it sends the status, and fail there.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Generic, Protocol, TypeVar

from google.protobuf.message import Message

END_S = 1.0  # a peer ends a stream right after its last message
MAX_AHEAD = 16  # messages of one stream that have been read and not taken
MAX_AHEAD_BYTES = 2**16  # of these; the one that exceeds it is the last one read

MessageT = TypeVar("MessageT", bound=Message)
ResultT = TypeVar("ResultT")


class StreamCall(Protocol):
    """`grpc.aio.UnaryStreamCall` and `grpc.aio.StreamStreamCall`."""

    def read(self) -> Coroutine[Any, Any, object]: ...
    def cancel(self) -> bool: ...
    def done(self) -> bool: ...
    def code(self) -> Coroutine[Any, Any, Any]: ...
    def add_done_callback(self, callback: Callable[[Any], None]) -> None: ...


class MessageStream(Generic[MessageT]):
    """The messages of a stream, in order. Whoever stops before the end has to close it, which cancels the call. After a
    message that `is_last` the peer has END_S to end the call.

    A task of its own reads ahead. One task for all messages costs less than one for each, and a read that has begun is
    not cancelled when the consumer is. The task stops at MAX_AHEAD messages that were not taken, and gRPC then holds up
    the peer.

    Raises `grpc.aio.AioRpcError` if the call fails, after the messages that came before.
    """

    def __init__(
        self, call: StreamCall, kind: type[MessageT], is_last: Callable[[MessageT], object] = lambda _: False
    ) -> None:
        self._call = call
        self._kind = kind
        self._is_last = is_last
        self._ahead: deque[MessageT] = deque()
        self._num_bytes = 0  # of all messages that were read since `_ahead` was empty
        self._has_ended = self._is_closed = self._ends_by_itself = False
        self._failure: BaseException | None = None
        self._news: asyncio.Future[None] | None = None  # for the taker
        self._room: asyncio.Future[None] | None = None  # for the reader
        self._reading = asyncio.create_task(self._read())

    def __aiter__(self) -> MessageStream[MessageT]:
        return self

    async def __anext__(self) -> MessageT:
        while not self._ahead:
            if self._has_ended:
                if self._failure is None:
                    raise StopAsyncIteration
                failure, self._failure = self._failure, None
                try:
                    raise failure
                finally:
                    del failure  # its stack holds this frame
            self._news = asyncio.get_running_loop().create_future()
            await self._news
        message = self._ahead.popleft()
        if not self._ahead:
            self._num_bytes = 0
        if self._room is not None and not self._is_full:
            _wake(self._room)
        return message

    async def _read(self) -> None:
        try:
            while isinstance(message := await self._call.read(), self._kind):  # its end is an object of gRPC's own
                self._ahead.append(message)
                self._num_bytes += message.ByteSize()
                _wake(self._news)
                if self._is_last(message):
                    self._ends_by_itself = True
                    return
                while self._is_full and not self._is_closed:
                    self._room = asyncio.get_running_loop().create_future()
                    await self._room
                if self._is_closed:
                    return
        except (Exception, asyncio.CancelledError) as error:  # raised where messages are taken
            if not self._is_closed:  # nobody would take it, and its stack holds this frame
                self._failure = error
        finally:
            self._has_ended = True
            _wake(self._news)

    @property
    def _is_full(self) -> bool:
        return len(self._ahead) >= MAX_AHEAD or self._num_bytes >= MAX_AHEAD_BYTES

    async def aclose(self) -> None:
        self._is_closed, self._failure = True, None
        _wake(self._room)
        if self._ends_by_itself and not self._call.done():
            timer = asyncio.get_running_loop().call_later(END_S, self._call.cancel)
            self._call.add_done_callback(lambda _: timer.cancel())
        else:
            await end_call(self._call)


async def end_call(call: StreamCall) -> None:
    """Cancels a call, if it has not ended.

    If a peer ends a call before it has taken a message of ours, writing that message fails, and for `grpc.aio` the call
    has ended with INTERNAL then. gRPC itself waits until somebody has read all of the call's messages, which nobody can
    do any more, and would keep the call for ever, some 30 KB. So such a call is cancelled in gRPC itself, by a private
    name of grpcio; `tests/common/test_grpc_streams.py` fails if a newer version differs.
    """
    if not call.cancel() and (await call.code()).name == "INTERNAL":
        call._cython_call.cancel("closed")  # type: ignore[attr-defined]


def _wake(waiting: asyncio.Future[None] | None) -> None:
    if waiting is not None and not waiting.done():
        waiting.set_result(None)


async def uncancelled(reading: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Returns what `reading` returns. If the caller is cancelled, `reading` goes on until its call ends."""
    task = asyncio.create_task(reading)
    task.add_done_callback(_take_error)
    return await asyncio.shield(task)


def _take_error(task: asyncio.Task[ResultT]) -> None:
    """Takes the error of a read that nobody waits for any more, so that asyncio does not log it."""
    if not task.cancelled():
        task.exception()
