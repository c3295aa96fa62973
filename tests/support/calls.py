"""Reading gRPC calls of asyncio message by message."""

from __future__ import annotations

from typing import Any, TypeVar, cast

import grpc

ResponseT = TypeVar("ResponseT")


async def received(
    call: grpc.aio.UnaryStreamCall[Any, ResponseT] | grpc.aio.StreamStreamCall[Any, ResponseT],
) -> ResponseT:
    """The next message of a call that has one."""
    message = await call.read()
    assert message is not grpc.aio.EOF, "the call has ended"
    return cast("ResponseT", message)
