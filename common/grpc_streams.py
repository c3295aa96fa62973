"""Reading streams of responses without leaving memory behind.

grpcio never frees what it took for a batch of operations that failed, or whose awaiter was cancelled
(https://github.com/grpc/grpc/issues/43360, seen with 1.69 to 1.85): up to a KiB for each call that is cancelled while
it waits for a message, scattered over the heap, for good. So nobody here cancels a read that has begun: the call is
cancelled instead, and its read then ends by itself. And a call whose last message has come may end by itself:
cancelled, it would often meet its server in the middle of saying how it ended, which then fails there.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, Protocol, TypeVar

END_S = 1.0  # a peer ends a stream right after its last message

MessageT = TypeVar("MessageT")
ResultT = TypeVar("ResultT")


class StreamCall(Protocol):
    """`grpc.aio.UnaryStreamCall` and `grpc.aio.StreamStreamCall`."""

    def read(self) -> Coroutine[Any, Any, object]: ...
    def cancel(self) -> bool: ...
    def done(self) -> bool: ...
    def add_done_callback(self, callback: Callable[[Any], None]) -> None: ...


async def messages(
    call: StreamCall, kind: type[MessageT], is_last: Callable[[MessageT], object] = lambda _: False
) -> AsyncGenerator[MessageT, None]:
    """Each message of the stream, in order. To be closed by whoever stops before its end, which cancels the call; after
    a message that `is_last` the peer has END_S to end it.

    Raises `grpc.aio.AioRpcError` if the call fails.
    """
    ends_by_itself = False
    try:
        while isinstance(message := await uncancelled(call.read()), kind):  # its end is an object of gRPC's own
            ends_by_itself = bool(is_last(message))
            yield message
    finally:
        if ends_by_itself and not call.done():
            timer = asyncio.get_running_loop().call_later(END_S, call.cancel)
            call.add_done_callback(lambda _: timer.cancel())
        else:
            call.cancel()  # does nothing to a call that has ended


async def uncancelled(reading: Coroutine[Any, Any, ResultT]) -> ResultT:
    """What `reading` returns. If the caller is cancelled, `reading` goes on alone, until its call ends."""
    task = asyncio.create_task(reading)
    task.add_done_callback(_see)
    return await asyncio.shield(task)


def _see(task: asyncio.Task[ResultT]) -> None:
    """If nobody waits for it any more, it may end as it likes."""
    if not task.cancelled():
        task.exception()
