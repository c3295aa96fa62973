"""Messages on a worker's port that are none: refused as INVALID_ARGUMENT.

Left to itself, gRPC reports each as an error of this server, with a stack in the log: a peer that sends rubbish could
fill the log and look like a defect of the worker.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any, cast

import grpc
from google.protobuf.message import DecodeError

from common.errors import InvalidArgumentError
from protos.status import status_details

Context = grpc.aio.ServicerContext[Any, Any]


def bad_message(error: DecodeError) -> InvalidArgumentError:
    return InvalidArgumentError("request", f"is no such message: {error}")


class BadMessageInterceptor(grpc.aio.ServerInterceptor):
    """For calls with one request. A stream's handler reads its messages itself, and meets `DecodeError` there."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming or handler.request_deserializer is None:
            return handler
        parse: Callable[[bytes], Any] = handler.request_deserializer

        def parsed(data: bytes) -> Any:
            try:
                return parse(data)
            except DecodeError as error:
                return bad_message(error)

        if handler.response_streaming:
            streaming = _streaming(cast("Callable[[Any, Context], Any]", handler.unary_stream))
            return grpc.unary_stream_rpc_method_handler(streaming, parsed, handler.response_serializer)
        unary = _unary(cast("Callable[[Any, Context], Awaitable[Any]]", handler.unary_unary))
        return grpc.unary_unary_rpc_method_handler(unary, parsed, handler.response_serializer)


def _unary(function: Callable[[Any, Context], Awaitable[Any]]) -> Callable[[Any, Context], Awaitable[Any]]:
    async def handle(request: Any, context: Context) -> Any:
        await _refuse_bad(request, context)
        answer = function(request, context)
        return await answer if inspect.isawaitable(answer) else answer

    return handle


def _streaming(function: Callable[[Any, Context], Any]) -> Callable[[Any, Context], Awaitable[None]]:
    async def handle(request: Any, context: Context) -> None:
        await _refuse_bad(request, context)
        answers = function(request, context)
        if inspect.isawaitable(answers):  # it writes its answers itself
            await answers
            return
        try:
            async for answer in answers:
                await context.write(answer)
        finally:
            await answers.aclose()

    return cast("Callable[[Any, Context], Any]", handle)


async def _refuse_bad(request: Any, context: Context) -> None:
    if isinstance(request, InvalidArgumentError):
        code = grpc.StatusCode[request.grpc_code]
        await context.abort(code, request.message, trailing_metadata=status_details(request))
