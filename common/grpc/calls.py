"""Handles calls of a grpc.aio server: a call's one message has to come within a time limit, and each failure gets its
status.

Left to itself, gRPC waits for a call's message as long as the call lasts, and reports a message that cannot be parsed
as an error of this server, with a stack in the log: a peer that sends rubbish could fill the port and the log, and look
like a defect here. So handlers are registered as `stream_stream`, whose messages gRPC reads only when it is asked to.
On the wire there is no difference.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
from collections.abc import Coroutine, Iterator
from typing import Any, NoReturn, cast

import grpc
from google.protobuf.message import DecodeError

from common.errors import BatonError, DeadlineError, InternalError, InvalidArgumentError
from common.grpc.status import short, status_details
from common.grpc.streams import uncancelled

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]


async def handle_call(context: Context, handling: Coroutine[Any, Any, None]) -> None:
    """Runs `handling`. If it raises, the call ends with the status of that error."""
    failure: BatonError | None = None
    try:
        with unless_over():
            await handling
    except Exception as error:
        failure = failure_of(error)
    if failure is not None:  # here, where no frame holds the request: gRPC keeps how a call was aborted
        await abort(context, failure.without_stack())


@contextlib.contextmanager
def unless_over() -> Iterator[None]:
    """Use it around writes: `grpc.aio.InternalError` says that nothing can be sent any more, which gRPC notices before
    it cancels the handler. It becomes the cancellation."""
    try:
        yield
    except grpc.aio.InternalError:
        raise asyncio.CancelledError from None


async def receive(context: Context, timeout_s: float) -> bytes:
    """The call's one message. Raises `DeadlineError` if it comes too late, `InvalidArgumentError` if there is none."""
    try:
        async with asyncio.timeout(timeout_s):
            data = await uncancelled(context.read())
    except TimeoutError:
        raise DeadlineError(f"the request did not come within {timeout_s:g} s") from None
    if data is grpc.aio.EOF:
        raise InvalidArgumentError("request", "is missing: the call ended without one")
    return cast("bytes", data)


async def send(context: Context, answers: Any) -> None:
    """Writes what a handler returned: an async generator of messages, one message (or its awaitable), or None."""
    if inspect.isasyncgen(answers):
        try:
            async for answer in answers:
                await context.write(answer)
        finally:
            await answers.aclose()
        return
    answer = await answers if inspect.isawaitable(answers) else answers
    if answer is not None:
        await context.write(answer)


async def abort(context: Context, error: BatonError) -> NoReturn:
    """Ends the call with `error`. Trailing metadata that was set before goes with it."""
    trailing = (*(context.trailing_metadata() or ()), *status_details(error))
    await context.abort(grpc.StatusCode[error.grpc_code], short(error.message), trailing_metadata=trailing)
    raise AssertionError("abort always raises")


def failure_of(error: Exception) -> BatonError:
    """The error that the caller gets for a handler's exception. Raises `error` itself if the handler ended its call by
    it."""
    if isinstance(error, BatonError):
        return error
    if isinstance(error, DecodeError):
        return InvalidArgumentError("request", f"is not a valid message: {error}")
    if isinstance(error, grpc.aio.AbortError):
        raise error
    log.error("a handler failed", exc_info=error)
    return InternalError(f"internal error: {type(error).__name__}")
