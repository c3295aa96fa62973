"""Asks gRPC calls for their API key, before any handler sees them.

What needs none is listed, so that a new service needs one until somebody decides otherwise: health, which load
balancers ask for, and the counters that autoscalers watch. Both hold numbers and no content.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar, cast

import grpc

from common.errors import UnauthenticatedError
from router.api.api_keys import ApiKeys, current_client
from router.api.grpc_errors import abort

OPEN_SERVICES = frozenset({"grpc.health.v1.Health", "baton.v1.DemandService"})

Context = grpc.aio.ServicerContext[object, object]
RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")


class KeyInterceptor(grpc.aio.ServerInterceptor):
    def __init__(self, keys: ApiKeys) -> None:
        self._keys = keys

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[RequestT, ResponseT] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[RequestT, ResponseT] | None:
        handler = await continuation(handler_call_details)
        service = handler_call_details.method.lstrip("/").partition("/")[0]
        if handler is None or service in OPEN_SERVICES:
            return handler
        metadata = dict(handler_call_details.invocation_metadata or ())
        authorization = metadata.get("authorization")
        try:
            current_client.set(self._keys.client(cast("str | None", authorization), "grpc"))
        except UnauthenticatedError as error:
            return cast("grpc.RpcMethodHandler[RequestT, ResponseT]", _refusing(handler, error))
        return handler


def _refusing(
    handler: grpc.RpcMethodHandler[RequestT, ResponseT], error: UnauthenticatedError
) -> grpc.RpcMethodHandler[object, object]:
    """A handler of the same kind that ends each call with `error`."""

    async def refuse(_request: object, context: Context) -> object:
        return await abort(context, error)

    if handler.request_streaming and handler.response_streaming:
        return grpc.stream_stream_rpc_method_handler(refuse)
    if handler.request_streaming:
        return grpc.stream_unary_rpc_method_handler(refuse)
    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler(refuse)
    return grpc.unary_unary_rpc_method_handler(refuse)
