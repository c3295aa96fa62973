"""Reads what comes in on a worker's port: a message that is none, or that does not come, is refused.

Left to itself, gRPC waits for a call's message as long as the call lasts, and reports one that cannot be parsed as an
error of this server, with a stack in the log: a peer that sends rubbish could fill the port and the log, and look like
a defect of the worker.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import Any, cast

import grpc
from google.protobuf.message import DecodeError

from common.errors import BatonError, DeadlineError, InvalidArgumentError
from common.grpc_options import LOSS_NOTICED_S
from common.grpc_streams import uncancelled
from protos.status import status_details

Context = grpc.aio.ServicerContext[Any, Any]
RECEIVE_TIMEOUT_S = LOSS_NOTICED_S  # for a call's one message to come; callers are neighbours


def bad_message(error: DecodeError) -> InvalidArgumentError:
    return InvalidArgumentError("request", f"is no such message: {error}")


class ReceivingInterceptor(grpc.aio.ServerInterceptor):
    """Registers every handler as one of streams, and reads its message itself; on the wire there is no difference.

    Handlers raise `BatonError`, whose status the call gets.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        parser = handler.request_deserializer if handler.request_streaming else None
        return grpc.stream_stream_rpc_method_handler(_handle(handler), parser, handler.response_serializer)


def _handle(handler: grpc.RpcMethodHandler[Any, Any]) -> Callable[[Any, Context], Awaitable[None]]:
    functions = (handler.unary_unary, handler.unary_stream, handler.stream_unary, handler.stream_stream)
    function = cast("Callable[[Any, Context], Any]", next(function for function in functions if function is not None))

    async def run(messages: Any, context: Context) -> None:
        request = messages if handler.request_streaming else await _receive(handler, context)
        await _answer(function(request, context), context)

    async def handle(messages: Any, context: Context) -> None:
        failure: BatonError | None = None
        try:
            await run(messages, context)
        except DecodeError as error:
            failure = bad_message(error)
        except grpc.aio.InternalError:  # nothing can be sent any more: gRPC notices before it cancels this
            raise asyncio.CancelledError from None
        except BatonError as error:
            failure = error
        if failure is not None:  # here, where no frame holds the request: gRPC keeps how a call was aborted
            await _abort(context, failure.without_stack())

    return handle


async def _receive(handler: grpc.RpcMethodHandler[Any, Any], context: Context) -> Any:
    """The call's one message. Raises `DecodeError`, `DeadlineError`, `InvalidArgumentError`."""
    try:
        async with asyncio.timeout(RECEIVE_TIMEOUT_S):
            data = await uncancelled(context.read())
    except TimeoutError:
        raise DeadlineError(f"the request did not come within {RECEIVE_TIMEOUT_S:g} s") from None
    if data is grpc.aio.EOF:
        raise InvalidArgumentError("request", "is missing: the call ended without one")
    parse = handler.request_deserializer
    return data if parse is None else parse(data)


async def _answer(answers: Any, context: Context) -> None:
    """Writes what a handler gave: one answer, many, or none if it writes them itself."""
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


async def _abort(context: Context, error: BatonError) -> None:
    code = grpc.StatusCode[error.grpc_code]
    await context.abort(code, error.message, trailing_metadata=status_details(error))
