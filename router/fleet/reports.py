"""What workers and routers report of themselves on streams: read until the stream ends or falls silent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import TypeVar

import grpc
from google.protobuf.message import Message

from common.errors import UnavailableError
from common.grpc.streams import StreamCall, uncancelled
from router.fleet.patience import PATIENCE

ReportT = TypeVar("ReportT", bound=Message)


async def reports(
    call: StreamCall, kind: type[ReportT], silence_s: float = PATIENCE.silence_s
) -> AsyncGenerator[ReportT, None]:
    """The reports of a stream, until it ends. Raises `TimeoutError` if none comes for `silence_s`,
    `grpc.aio.AioRpcError` if it fails."""
    while True:
        async with asyncio.timeout(silence_s):
            report = await uncancelled(call.read())
        if not isinstance(report, kind):  # grpc.aio.EOF
            return
        yield report


def why_unread(error: Exception, silence_s: float = PATIENCE.silence_s) -> str:
    """In words, why a peer's reports could not be read on. Raises `error` again if that is a defect of ours."""
    match error:
        case TimeoutError():
            return f"has been silent for {silence_s:g} s"
        case UnavailableError():
            return error.message
        case grpc.aio.AioRpcError() if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            return "does not answer"
        case grpc.aio.AioRpcError():
            return f"{error.code().name}: {error.details()}"
    raise error
