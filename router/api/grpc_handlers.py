"""Registers a servicer on a grpc.aio server. A call has to pass the gate before its message is read.

Handlers are written without error handling: they raise `BatonError`, and get only requests that could be parsed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import cast

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from common.errors import DeadlineError, InvalidArgumentError
from common.grpc.calls import Context, handle_call, receive, send
from common.grpc.server import add_handlers
from router.api.access_log import AccessLog
from router.api.api_keys import current_client
from router.api.grpc_parser import Parser
from router.limits.gate import Gate

UnaryHandler = Callable[[Message, Context], Awaitable[Message]]
StreamHandler = Callable[[Message, Context], AsyncGenerator[Message, None]]
MaxBytes = Callable[[], int]


def add_service(
    server: grpc.aio.Server,
    service: ServiceDescriptor,
    servicer: object,
    gate: Gate,
    max_bytes: MaxBytes | None = None,
    *,
    endless: bool = False,
    access_log: AccessLog | None = None,
) -> None:
    """`servicer` has one coroutine method, or async generator method, for each rpc of `service`.

    `max_bytes` says how large a request may be; `endless` streams have no time limit. `access_log`: of calls.
    """
    handlers = {
        method.name: _Handler(
            method, getattr(servicer, method.name), gate, max_bytes, endless=endless, access_log=access_log
        ).registered()
        for method in service.methods
    }
    add_handlers(server, service.full_name, handlers)


class _Handler:
    """One rpc."""

    def __init__(
        self,
        method: MethodDescriptor,
        function: object,
        gate: Gate,
        max_bytes: MaxBytes | None,
        *,
        endless: bool,
        access_log: AccessLog | None,
    ) -> None:
        if method.client_streaming:
            raise NotImplementedError(f"{method.full_name} streams requests")
        self._function = cast("UnaryHandler | StreamHandler", function)
        self._parser = Parser(GetMessageClass(method.input_type))
        self._gate = gate
        self._max_bytes = max_bytes
        self._endless = endless
        self._name = method.full_name
        self._access_log = access_log

    def registered(self) -> grpc.RpcMethodHandler[object, object]:
        return grpc.stream_stream_rpc_method_handler(self.handle, None, _serialize)

    async def handle(self, _messages: object, context: Context) -> None:
        handling = handle_call(context, self._run(context))
        await (handling if self._access_log is None else self._access_log.around(self._name, context, handling))

    async def _run(self, context: Context) -> None:
        limit_s = None if self._endless else self._gate.limits.answer_timeout_s
        client = current_client.get()
        key = client.name if client else ""
        try:
            with self._gate.requests(key):
                async with asyncio.timeout(limit_s):
                    await self._answer(context, key)
        except TimeoutError:
            raise DeadlineError("the call took too long") from None

    async def _answer(self, context: Context, key: str) -> None:
        with self._gate.bytes_held() as held:
            data = await self._receive(context, key)
            held.add(len(data))
            request = self._parser(data)
            del data
            await send(context, self._function(request, context))

    async def _receive(self, context: Context, key: str) -> bytes:
        """The request's bytes. Raises `DeadlineError` if they come too late, `InvalidArgumentError` if too many."""
        async with self._gate.reading(key):
            data = await receive(context, self._gate.limits.receive_timeout_s)
        limit = self._gate.limits.max_message_bytes if self._max_bytes is None else self._max_bytes()
        if len(data) > limit:
            raise InvalidArgumentError("request", f"has {len(data)} bytes, and may have {limit}")
        return data


def _serialize(message: object) -> bytes:
    return cast("Message", message).SerializeToString()
