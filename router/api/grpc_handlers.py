"""Registers a servicer on a grpc.aio server. A call has to pass the gate before its message is read.

Handlers are written without error handling: they raise `BatonError`, and get only requests that could be parsed. That
of an rpc whose client streams requests is called for each of them; they are answered side by side.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Any, cast

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from common.errors import BatonError, DeadlineError, InvalidArgumentError, OverloadedError
from common.grpc.calls import Context, failure_of, handle_call, receive, send, unless_over
from common.grpc.server import add_handlers
from common.grpc.streams import uncancelled
from router.api.access_log import AccessLog
from router.api.api_keys import current_client
from router.api.echo import echoed
from router.api.grpc_parser import Parser
from router.limits.gate import Gate

UnaryHandler = Callable[[Message, Context], Awaitable[Message]]
StreamHandler = Callable[[Message, Context], AsyncGenerator[Message, None]]
MaxBytes = Callable[[], int]
Guard = Callable[[str, Context], AbstractAsyncContextManager[None]]
"""Around a call: is entered before its message is read, with the name of its method, and may refuse it."""

MAX_CONVERSATIONS = 256  # open streams of requests, or as many messages as the gate holds bytes for
MAX_SIDE_BY_SIDE = 256  # requests of one stream that are answered at a time; it is not read on until one has ended


def add_service(
    server: grpc.aio.Server,
    service: ServiceDescriptor,
    servicer: object,
    gate: Gate,
    max_bytes: MaxBytes | None = None,
    *,
    endless: bool = False,
    access_log: AccessLog | None = None,
    guard: Guard | None = None,
) -> None:
    """`servicer` has one coroutine method, or async generator method, for each rpc of `service`; an async generator
    method for one whose client streams requests, beside `failed(request, error)`, which makes the answer to one of them
    that failed (None if it could not be parsed).

    `max_bytes` says how large a request may be; `endless` streams have no time limit. `access_log`: of calls.
    """
    handlers = {
        method.name: (_Conversation if method.client_streaming else _Handler)(
            method, servicer, gate, max_bytes, endless=endless, access_log=access_log, guard=guard
        ).registered()
        for method in service.methods
    }
    add_handlers(server, service.full_name, handlers)


class _Handler:
    """One rpc."""

    def __init__(
        self,
        method: MethodDescriptor,
        servicer: object,
        gate: Gate,
        max_bytes: MaxBytes | None,
        *,
        endless: bool,
        access_log: AccessLog | None,
        guard: Guard | None,
    ) -> None:
        self._function = cast("UnaryHandler | StreamHandler", getattr(servicer, method.name))
        self._failed = getattr(servicer, "failed", None)
        self._parser = Parser(GetMessageClass(method.input_type))
        self._gate = gate
        self._max_bytes = max_bytes
        self._endless = endless
        self._name = method.full_name
        self._access_log = access_log
        self._guard = guard

    def registered(self) -> grpc.RpcMethodHandler[object, object]:
        return grpc.stream_stream_rpc_method_handler(self.handle, None, _serialize)

    async def handle(self, _messages: object, context: Context) -> None:
        if back := echoed(context.invocation_metadata()):
            context.set_trailing_metadata(back)
        handling = handle_call(context, self._run(context))
        await (handling if self._access_log is None else self._access_log.around(self._name, context, handling))

    async def _run(self, context: Context) -> None:
        if self._guard is None:
            await self._within_limits(context)
            return
        async with self._guard(self._name, context):
            await self._within_limits(context)

    async def _within_limits(self, context: Context) -> None:
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
        self._check_size(data)
        return data

    def _check_size(self, data: bytes) -> None:
        limit = self._gate.limits.max_message_bytes if self._max_bytes is None else self._max_bytes()
        if len(data) > limit:
            raise InvalidArgumentError("request", f"has {len(data)} bytes, and may have {limit}")


class _Conversation(_Handler):
    """One rpc whose client streams requests. Each passes the gate by itself. The stream has a place of its own, and
    ends once nothing is answered and nothing has come for as long as an answer may take, or once its client does not
    read."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._num_open: Counter[str] = Counter()  # by key

    async def _within_limits(self, context: Context) -> None:
        client = current_client.get()
        key = client.name if client else ""
        with self._place(key), self._gate.requests(key):
            try:
                await self._converse(context, key)
            except ExceptionGroup as group:  # of its tasks; the first to fail ended the others
                raise group.exceptions[0] from None

    @contextlib.contextmanager
    def _place(self, key: str) -> Iterator[None]:
        """Raises `OverloadedError`. Each open stream may hold memory for a message. One key gets half of the places."""
        limits = self._gate.limits
        most = min(MAX_CONVERSATIONS, max(1, limits.max_buffered_bytes // limits.max_message_bytes))
        if self._num_open.total() >= most:
            raise OverloadedError(f"this process has {most} open streams of {self._name}")
        most_per_key = max(1, most // 2)
        if key and self._num_open[key] >= most_per_key:
            raise OverloadedError(f"this key has {most_per_key} open streams of {self._name}, the most for one")
        self._num_open[key] += 1
        try:
            yield
        finally:
            self._num_open[key] -= 1
            if not self._num_open[key]:
                del self._num_open[key]

    async def _converse(self, context: Context, key: str) -> None:
        limit_s = self._gate.limits.answer_timeout_s
        room = _Room(MAX_SIDE_BY_SIDE)
        write_lock = asyncio.Lock()
        async with asyncio.TaskGroup() as answering:
            reading = answering.create_task(_read(context))
            while True:
                done, _ = await asyncio.wait((reading,), timeout=limit_s)
                if not done and room.is_empty:
                    break
                if not done:
                    continue
                data = reading.result()
                if data is grpc.aio.EOF:
                    return
                await room.enter()
                one = answering.create_task(self._answer_one(cast("bytes", data), context, key, write_lock))
                one.add_done_callback(room.left)
                del data
                reading = answering.create_task(_read(context))
            reading.cancel()
        raise DeadlineError(f"no request came for {limit_s:g} s")

    async def _answer_one(self, data: bytes, context: Context, key: str, write_lock: asyncio.Lock) -> None:
        """Answers one request. A failure is an answer, too."""
        request: Message | None = None
        failure: BatonError | None = None
        try:
            with unless_over(), self._gate.requests(key), self._gate.bytes_held() as held:
                self._check_size(data)
                held.add(len(data))
                request = self._parser(data)
                del data
                answers = cast("StreamHandler", self._function)(request, context)
                async with aclosing(answers), asyncio.timeout(self._gate.limits.answer_timeout_s):
                    async for answer in answers:
                        await uncancelled(_write(context, answer, write_lock))
        except TimeoutError:
            failure = DeadlineError("the answer took too long")
        except Exception as error:
            failure = failure_of(error)
        if failure is not None:
            failed = cast("Callable[[Message | None, BatonError], Message]", self._failed)
            await self._tell(context, failed(request, failure), write_lock)

    async def _tell(self, context: Context, message: Message, write_lock: asyncio.Lock) -> None:
        """Writes what a failed request gets, behind answers that wait for a client that reads slowly. Raises
        `DeadlineError`, which ends the stream, if it does not read at all."""
        limits = self._gate.limits
        try:
            with unless_over():
                async with asyncio.timeout(limits.answer_timeout_s + limits.receive_timeout_s):
                    await uncancelled(_write(context, message, write_lock))
        except TimeoutError:
            raise DeadlineError("the client does not read the answers") from None


class _Room:
    """For so many at a time."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._places = asyncio.Semaphore(size)
        self._num_inside = 0

    @property
    def is_empty(self) -> bool:
        return self._num_inside == 0

    async def enter(self) -> None:
        """Waits for a place."""
        await self._places.acquire()
        self._num_inside += 1

    def left(self, _task: object) -> None:
        self._num_inside -= 1
        self._places.release()


async def _write(context: Context, message: Message, lock: asyncio.Lock) -> None:
    """Run it to its end: gRPC takes one message at a time, and goes on with that of a writer that was cancelled."""
    async with lock:
        await context.write(message)


async def _read(context: Context) -> object:
    """The next message's bytes, or EOF."""
    return await uncancelled(context.read())


def _serialize(message: object) -> bytes:
    return cast("Message", message).SerializeToString()
