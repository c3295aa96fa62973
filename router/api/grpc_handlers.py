"""Registers a servicer on a grpc.aio server so that every failure of a handler becomes a proper status.

Handlers are written without error handling: they raise `BatonError`, and get only requests that could be parsed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import cast

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from common.errors import BatonError, InternalError
from router.api.grpc_errors import BadMessage, Parser, abort

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[object, object]
UnaryHandler = Callable[[Message, Context], Awaitable[Message]]
StreamHandler = Callable[[Message, Context], AsyncGenerator[Message, None]]


def add_service(server: grpc.aio.Server, service: ServiceDescriptor, servicer: object) -> None:
    """`servicer` has one coroutine method, or async generator method, for each rpc of `service`."""
    handlers = {method.name: _handler(method, getattr(servicer, method.name)) for method in service.methods}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.full_name, handlers),))


def _handler(method: MethodDescriptor, function: object) -> grpc.RpcMethodHandler[object, object]:
    if method.client_streaming:
        raise NotImplementedError(f"{method.full_name} streams requests")
    parser = Parser(GetMessageClass(method.input_type))
    if method.server_streaming:
        return grpc.unary_stream_rpc_method_handler(_streaming(cast("StreamHandler", function)), parser, _serialize)
    return grpc.unary_unary_rpc_method_handler(_unary(cast("UnaryHandler", function)), parser, _serialize)


def _serialize(message: object) -> bytes:
    return cast("Message", message).SerializeToString()


def _unary(function: UnaryHandler) -> Callable[[object, Context], Awaitable[object]]:
    async def handle(request: object, context: Context) -> object:
        if isinstance(request, BadMessage):
            await abort(context, request.error)
        try:
            return await function(cast("Message", request), context)
        except Exception as error:
            await abort(context, _as_baton(error))

    return handle


def _streaming(function: StreamHandler) -> Callable[[object, Context], AsyncIterator[object]]:
    async def handle(request: object, context: Context) -> AsyncIterator[object]:
        if isinstance(request, BadMessage):
            await abort(context, request.error)
        try:
            async with aclosing(function(cast("Message", request), context)) as responses:
                async for response in responses:
                    yield response
        except Exception as error:
            await abort(context, _as_baton(error))

    return handle


def _as_baton(error: Exception) -> BatonError:
    if isinstance(error, BatonError):
        return error
    if isinstance(error, grpc.aio.AbortError | asyncio.CancelledError):
        raise error
    log.error("a handler failed", exc_info=error)
    return InternalError(f"internal error: {type(error).__name__}")
