"""Clients that ask a router, or a worker directly, and cost little themselves."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit

import grpc

from bench.instant_worker import MAX_STREAMS, MODEL
from common.errors import InternalError
from protos.baton.v1 import decode_pb2, decode_pb2_grpc, inference_pb2, inference_pb2_grpc, types_pb2

PROMPT = "Which of the dogs in the yard was it that the quick brown fox jumped over, and how often did it do so? " * 2
NUM_PROMPT_TOKENS = 50  # about as many
_END = b"0\r\n\r\n"
_READ_BYTES = 2**18

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Client(Protocol):
    def events(self, stream: int, max_tokens: int) -> AsyncIterator[int]:
        """Asks once, and says how many events with tokens came, whenever some came. `stream`: no two requests of one
        stream at a time. An answer of one token is not streamed. Raises `InternalError` if it is refused or cut off."""

    async def close(self) -> None: ...


class Rest:
    """One connection for each stream, kept open. A server may close one that is idle: then the stream gets another."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._address = (parts.hostname, parts.port)
        self._connections: dict[int, Connection] = {}

    async def events(self, stream: int, max_tokens: int) -> AsyncIterator[int]:
        body = {"model": MODEL, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": max_tokens}
        content = json.dumps({**body, "stream": max_tokens > 1}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nContent-Length: {len(content)}\r\n"
        request = f"{head}Content-Type: application/json\r\n\r\n".encode() + content
        try:
            reader, answer = await self._ask(stream, request)
            status = answer.partition(b"\r\n")[0].decode(errors="replace")
            if not status.startswith("http/1.1 200"):
                raise InternalError(f"the router answers {status!r}")
            if b"content-length: " in answer:
                await reader.readexactly(int(answer.partition(b"content-length: ")[2].split(b"\r\n")[0]))
                yield 1
                return
            num_others = 1  # the role, which opens the answer, comes before or with its first token
            end = b""
            while end != _END:
                more = await reader.read(_READ_BYTES)
                if not more:
                    raise InternalError("an answer was cut off")
                end = (end + more)[-len(_END) :]
                num = more.count(b"data: ") - more.count(b"data: [DONE]")
                ignored = min(num, num_others)
                num_others -= ignored
                yield num - ignored
        except (asyncio.IncompleteReadError, OSError) as error:
            raise InternalError(f"an answer was cut off: {error}") from error

    async def _ask(self, stream: int, request: bytes) -> tuple[asyncio.StreamReader, bytes]:
        """Sends `request`; where its answer comes from, and the answer's head. Once more, on a new connection, if the
        one that was kept is closed before a byte of the answer came: the server closed it before the request was there.
        """
        if kept := self._connections.get(stream):
            try:
                return kept[0], await _head_of(kept, request)
            except (asyncio.IncompleteReadError, ConnectionError) as error:
                if isinstance(error, asyncio.IncompleteReadError) and error.partial:
                    raise
                self._connections.pop(stream)[1].close()
        try:
            opened = self._connections[stream] = await asyncio.open_connection(*self._address)
        except OSError as error:
            raise InternalError(f"the router takes no connection: {error}") from error
        return opened[0], await _head_of(opened, request)

    async def close(self) -> None:
        for _, writer in self._connections.values():
            writer.close()


async def _head_of(connection: Connection, request: bytes) -> bytes:
    """Sends `request`, and returns the head of the answer in small letters."""
    reader, writer = connection
    writer.write(request)
    return (await reader.readuntil(b"\r\n\r\n")).lower()


class Grpc:
    """One channel for all streams."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address, [("grpc.max_concurrent_streams", MAX_STREAMS)])
        self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)

    async def events(self, stream: int, max_tokens: int) -> AsyncIterator[int]:  # noqa: ARG002 (one channel)
        message = inference_pb2.ChatMessage(role="user", content=PROMPT)
        params = types_pb2.SamplingParams(max_tokens=max_tokens)
        try:
            async for _ in self._stub.Chat(inference_pb2.ChatRequest(messages=[message], sampling_params=params)):
                yield 1
        except grpc.aio.AioRpcError as error:
            raise InternalError(f"the router answers {error.code().name}: {error.details()}") from error

    async def close(self) -> None:
        await self._channel.close()


class Direct:
    """A decode worker itself, with as many prompt tokens."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address)
        self._stub = decode_pb2_grpc.DecodeServiceStub(self._channel)

    async def events(self, stream: int, max_tokens: int) -> AsyncIterator[int]:  # noqa: ARG002 (one channel)
        params = types_pb2.SamplingParams(max_tokens=max_tokens)
        request = decode_pb2.DecodeRequest(prompt_token_ids=[1] * NUM_PROMPT_TOKENS, sampling_params=params)
        try:
            async for _ in self._stub.Decode(request):
                yield 1
        except grpc.aio.AioRpcError as error:
            raise InternalError(f"the worker answers {error.code().name}: {error.details()}") from error

    async def close(self) -> None:
        await self._channel.close()


_CLIENTS: dict[str, Callable[[str], Client]] = {"rest": Rest, "grpc": Grpc, "decode": Direct}


@dataclass(slots=True, frozen=True)
class Endpoint:
    kind: str  # of _CLIENTS
    address: str

    def connect(self) -> Client:
        """Needs a running loop."""
        return _CLIENTS[self.kind](self.address)


@dataclass(slots=True, frozen=True)
class Asked:
    """What a client saw of one request."""

    ttft_s: float  # to the first event with a token
    num_events: int  # with tokens


async def ask(client: Client, stream: int, max_tokens: int) -> Asked:
    """Returns once the answer is whole. Raises `InternalError` if it is not what was asked for."""
    begin, first, num = time.perf_counter(), 0.0, 0
    async for more in client.events(stream, max_tokens):
        if more and not first:
            first = time.perf_counter()
        num += more
    if not 0 < num <= max_tokens:
        raise InternalError(f"{num} events for {max_tokens} tokens")
    return Asked(first - begin, num)
