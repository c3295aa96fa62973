"""Asks gRPC calls for their API key, before any handler sees them and before their message is read.
A method that does not exist needs a key too.

What needs none is listed, so that a new service needs one until somebody decides otherwise: health, which load
balancers ask for, and the counters that autoscalers watch. Both hold numbers and no content.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar, cast

import grpc

from common.errors import UnauthenticatedError
from common.grpc.calls import Context, abort
from router.api.api_keys import ApiKeys, current_client
from router.api.audit_log import unauthenticated
from router.api.echo import echoed

AUDITED_SERVICE = "baton.v1.AdminService"
OPEN_SERVICES = frozenset({"grpc.health.v1.Health", "baton.v1.DemandService"})

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
        service = handler_call_details.method.lstrip("/").partition("/")[0]
        if service not in OPEN_SERVICES:
            metadata = dict(handler_call_details.invocation_metadata or ())
            authorization = metadata.get("authorization")
            try:
                current_client.set(self._keys.client(cast("str | None", authorization), "grpc"))
            except UnauthenticatedError as error:
                order = handler_call_details.method.lstrip("/") if service == AUDITED_SERVICE else ""
                return cast("grpc.RpcMethodHandler[RequestT, ResponseT]", _refusing(error, order))
        return await continuation(handler_call_details)


def _refusing(error: UnauthenticatedError, order: str) -> grpc.RpcMethodHandler[object, object]:
    """Ends each call with `error`. As a handler of streams it gets no message read, whatever the call's kind. `order`:
    the method's name if it would be an operator's order."""

    async def refuse(_messages: object, context: Context) -> object:
        context.set_trailing_metadata(echoed(context.invocation_metadata()))
        if order:
            unauthenticated(order, context, error)
        return await abort(context, error)

    return grpc.stream_stream_rpc_method_handler(refuse)
