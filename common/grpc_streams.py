"""Reading streams of responses without leaving memory behind.

grpcio never frees what it took for a batch of operations whose awaiter was cancelled
(https://github.com/grpc/grpc/issues/43360, seen with 1.69 to 1.85): a hundred bytes or so for each call that is
cancelled while it waits for a message, scattered over the heap, for good. So nobody here cancels a read that has begun:
the call is cancelled instead, and its read then ends by itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, Protocol, TypeVar

MessageT = TypeVar("MessageT")
ResultT = TypeVar("ResultT")


class StreamCall(Protocol):
    """`grpc.aio.UnaryStreamCall` and `grpc.aio.StreamStreamCall`."""

    def read(self) -> Coroutine[Any, Any, object]: ...
    def cancel(self) -> bool: ...


async def messages(call: StreamCall, kind: type[MessageT]) -> AsyncGenerator[MessageT, None]:
    """Each message of the stream, in order. To be closed by whoever stops before its end, which cancels the call.

    Raises `grpc.aio.AioRpcError` if the call fails.
    """
    try:
        while isinstance(message := await uncancelled(call.read()), kind):  # its end is an object of gRPC's own
            yield message
    finally:
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
