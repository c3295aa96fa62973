"""Registers a servicer on a grpc.aio server so that every failure of a handler becomes a proper status.

Handlers are written without error handling: they raise `BatonError`, and get only requests that could be parsed.

A call has to pass the gate before its message is read. So all handlers are registered as streaming ones, whose message
gRPC reads when it is asked to; on the wire there is no difference.
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

from common.errors import BatonError, DeadlineError, InternalError, InvalidArgumentError
from common.grpc_server import add_handlers
from common.grpc_streams import uncancelled
from router.api.api_keys import current_client
from router.api.grpc_errors import Parser, abort
from router.serving.gate import Gate

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[object, object]
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
) -> None:
    """`servicer` has one coroutine method, or async generator method, for each rpc of `service`.

    `max_bytes` says how large a request may be; `endless` streams have no time limit.
    """
    handlers = {
        method.name: _Handler(method, getattr(servicer, method.name), gate, max_bytes, endless=endless).registered()
        for method in service.methods
    }
    add_handlers(server, service.full_name, handlers)


class _Handler:
    """One rpc."""

    def __init__(
        self, method: MethodDescriptor, function: object, gate: Gate, max_bytes: MaxBytes | None, *, endless: bool
    ) -> None:
        if method.client_streaming:
            raise NotImplementedError(f"{method.full_name} streams requests")
        self._function = function
        self._is_streaming = method.server_streaming
        self._parser = Parser(GetMessageClass(method.input_type))
        self._gate = gate
        self._max_bytes = max_bytes
        self._endless = endless

    def registered(self) -> grpc.RpcMethodHandler[object, object]:
        return grpc.stream_stream_rpc_method_handler(self.handle, None, _serialize)

    async def handle(self, messages: AsyncIterator[bytes], context: Context) -> None:
        limit_s = None if self._endless else self._gate.limits.answer_timeout_s
        client = current_client.get()
        key = client.name if client else ""
        failure: BatonError | None = None
        try:
            with self._gate.requests(key):
                async with asyncio.timeout(limit_s):
                    await self._answer(messages, context, key)
        except TimeoutError:
            failure = DeadlineError("the call took too long")
        except grpc.aio.InternalError:  # nothing can be sent any more: gRPC notices before it cancels this
            raise asyncio.CancelledError from None
        except Exception as error:
            failure = _as_baton(error)
        if failure is not None:  # here, where no frame holds the request: gRPC keeps how a call was aborted
            await abort(context, failure.without_stack())

    async def _answer(self, messages: AsyncIterator[bytes], context: Context, key: str) -> None:
        with self._gate.bytes_held() as held:
            data = await self._receive(messages, key)
            held.add(len(data))
            request = self._parser(data)
            del data
            if not self._is_streaming:
                await context.write(await cast("UnaryHandler", self._function)(request, context))
                return
            async with aclosing(cast("StreamHandler", self._function)(request, context)) as responses:
                async for response in responses:
                    await context.write(response)

    async def _receive(self, messages: AsyncIterator[bytes], key: str) -> bytes:
        """The request's bytes. Raises `DeadlineError` if they come too late, `InvalidArgumentError` if too many."""
        timeout_s = self._gate.limits.receive_timeout_s
        try:
            async with self._gate.reading(key), asyncio.timeout(timeout_s):
                data = await uncancelled(_first(messages))
        except TimeoutError as error:
            raise DeadlineError(f"the request did not come within {timeout_s:g} s") from error
        if data is None:
            raise InvalidArgumentError("request", "is missing: the call ended without one")
        limit = self._gate.limits.max_message_bytes if self._max_bytes is None else self._max_bytes()
        if len(data) > limit:
            raise InvalidArgumentError("request", f"has {len(data)} bytes, and may have {limit}")
        return data


async def _first(messages: AsyncIterator[bytes]) -> bytes | None:
    return await anext(aiter(messages), None)


def _serialize(message: object) -> bytes:
    return cast("Message", message).SerializeToString()


def _as_baton(error: Exception) -> BatonError:
    if isinstance(error, BatonError):
        return error
    if isinstance(error, grpc.aio.AbortError | asyncio.CancelledError):
        raise error
    log.error("a handler failed", exc_info=error)
    return InternalError(f"internal error: {type(error).__name__}")
