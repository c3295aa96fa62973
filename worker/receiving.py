"""Every call of a worker's port has a limit for its message to come, and each failure its status."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, cast

import grpc

from common.grpc.calls import Context, handle_call, receive, send
from common.grpc.options import LOSS_NOTICED_S

RECEIVE_TIMEOUT_S = LOSS_NOTICED_S  # for a call's one message to come; callers are neighbours


class ReceivingInterceptor(grpc.aio.ServerInterceptor):
    """Handles every call as `common.grpc.calls` does. Handlers raise `BatonError`, whose status the call gets."""

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
        if handler.request_streaming:
            request = messages
        else:
            data = await receive(context, RECEIVE_TIMEOUT_S)
            request = data if handler.request_deserializer is None else handler.request_deserializer(data)
        await send(context, function(request, context))

    async def handle(messages: Any, context: Context) -> None:
        await handle_call(context, run(messages, context))

    return handle
