"""A proxy as Envoy behaves towards an external processor: one stream for each HTTP request, with its headers, body in
pieces and trailers, then those of the response. What the processor sends is applied as Envoy applies it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field

import grpc
import httpx
from google.protobuf.struct_pb2 import Struct

from protos.envoy import external_processor_pb2 as pb
from protos.envoy import external_processor_pb2_grpc as pb_grpc
from router.api.endpoint_picker.messages import (
    DESTINATION,
    LOAD_BALANCING,
    SERVED,
    SUBSET,
    SUBSET_HINT,
)

CHUNK = 16


def headers_message(headers: Mapping[str, str], *, is_end: bool = False) -> pb.HttpHeaders:
    values = [pb.HeaderValue(key=name, raw_value=value.encode()) for name, value in headers.items()]
    return pb.HttpHeaders(headers=pb.HeaderMap(headers=values), end_of_stream=is_end)


def request_headers(
    path: str,
    headers: Mapping[str, str],
    *,
    method: str = "POST",
    subset: Sequence[str] | str | None = None,
    is_end: bool = False,
    modes: tuple[pb.BodySendMode.ValueType, pb.BodySendMode.ValueType] | None = None,
) -> pb.ProcessingRequest:
    """The first message. `modes`: of the bodies of request and response; None: not told."""
    all_headers = {":method": method, ":path": path, ":authority": "llm.example", ":scheme": "http", **headers}
    message = pb.ProcessingRequest(request_headers=headers_message(all_headers, is_end=is_end))
    if subset is not None:
        fields = message.metadata_context.filter_metadata[SUBSET_HINT]
        fields[SUBSET] = subset if isinstance(subset, str) else list(subset)
    if modes is not None:
        message.protocol_config.request_body_mode, message.protocol_config.response_body_mode = modes
    return message


def body_messages(data: bytes, *, kind: str = "request_body", has_trailers: bool = False) -> list[pb.ProcessingRequest]:
    """In pieces of `CHUNK` bytes."""
    pieces = [data[start : start + CHUNK] for start in range(0, len(data), CHUNK)] or [b""]
    return [
        pb.ProcessingRequest(
            **{kind: pb.HttpBody(body=piece, end_of_stream=number == len(pieces) and not has_trailers)}  # type: ignore[arg-type]
        )
        for number, piece in enumerate(pieces, start=1)
    ]


def response_headers(served: str | None, status: int = 200, *, is_end: bool = False) -> pb.ProcessingRequest:
    message = pb.ProcessingRequest(response_headers=headers_message({":status": str(status)}, is_end=is_end))
    if served is not None:
        message.metadata_context.filter_metadata[LOAD_BALANCING][SERVED] = served
    return message


@dataclass(slots=True)
class Told:
    """What a processor made of a request."""

    headers: dict[str, str] = field(default_factory=dict)  # set
    removed: list[str] = field(default_factory=list)
    destination: str = ""
    metadata: str = ""
    body: bytes = b""
    has_ended: bool = False
    refusal: pb.ImmediateResponse | None = None

    @property
    def endpoints(self) -> list[str]:
        return self.destination.split(",") if self.destination else []

    def take(self, response: pb.ProcessingResponse) -> None:
        kind = response.WhichOneof("response")
        if kind == "immediate_response":
            assert not self.destination, "a request is refused that was let through"
            self.refusal, self.has_ended = response.immediate_response, True
            return
        if kind == "request_headers":
            assert not self.destination, "headers are answered twice"
            mutation = response.request_headers.response.header_mutation
            overwrite = pb.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
            assert all(one.append_action == overwrite for one in mutation.set_headers)
            self.headers = {one.header.key: one.header.raw_value.decode() for one in mutation.set_headers}
            self.removed = list(mutation.remove_headers)
            self.destination = self.headers.pop(DESTINATION)
            told = response.dynamic_metadata[LOAD_BALANCING]
            assert isinstance(told, Struct)
            metadata = told[DESTINATION]
            assert isinstance(metadata, str)
            self.metadata = metadata
            return
        assert self.destination, "a body goes on before its headers"
        assert not self.has_ended, "something follows the end of a request"
        if kind == "request_trailers":
            self.has_ended = True
            return
        assert kind == "request_body", kind
        piece = response.request_body.response.body_mutation.streamed_response
        self.body += piece.body
        self.has_ended = piece.end_of_stream


class Exchange:
    """One HTTP request of the proxy."""

    def __init__(self, call: grpc.aio.StreamStreamCall) -> None:  # type: ignore[type-arg]
        self.call = call

    async def send(self, *messages: pb.ProcessingRequest) -> None:
        for message in messages:
            await self.call.write(message)

    async def read(self) -> pb.ProcessingResponse | None:
        """None at the end of the stream."""
        response = await self.call.read()
        if response is grpc.aio.EOF:
            return None
        assert isinstance(response, pb.ProcessingResponse)
        return response

    async def request(
        self,
        path: str,
        headers: Mapping[str, str] | None = None,
        body: bytes | None = b"",
        *,
        method: str = "POST",
        subset: Sequence[str] | str | None = None,
        has_trailers: bool = False,
    ) -> Told:
        """Sends a whole request, and returns once all of it was answered."""
        is_end = body is None
        first = request_headers(path, headers or {}, method=method, subset=subset, is_end=is_end)
        await self.send(first, *(() if body is None else body_messages(body, has_trailers=has_trailers)))
        if has_trailers:
            await self.send(pb.ProcessingRequest(request_trailers=pb.HttpTrailers()))
        told = Told()
        while not told.has_ended:
            response = await self.read()
            assert response is not None, "the stream ended before the request's end"
            told.take(response)
            if is_end and told.destination:
                break
        return told

    async def response(self, served: str | None, body: bytes = b"", *, has_trailers: bool = False) -> bytes:
        """Sends a whole response, and returns the body that comes back."""
        await self.send(response_headers(served))
        headers = await self.read()
        assert headers is not None
        assert headers.WhichOneof("response") == "response_headers"
        back = b""
        for message in body_messages(body, kind="response_body", has_trailers=has_trailers):
            await self.send(message)
            answer = await self.read()
            assert answer is not None
            piece = answer.response_body.response.body_mutation.streamed_response
            assert piece.end_of_stream == message.response_body.end_of_stream
            back += piece.body
        if has_trailers:
            await self.send(pb.ProcessingRequest(response_trailers=pb.HttpTrailers()))
            last = await self.read()
            assert last is not None
            assert last.WhichOneof("response") == "response_trailers"
        return back

    async def ends(self) -> None:
        """The proxy is done; so is the processor."""
        await self.call.done_writing()
        assert await self.read() is None
        assert await self.call.code() is grpc.StatusCode.OK


class Envoy:
    def __init__(self, address: str, channel: grpc.aio.Channel | None = None) -> None:
        self.channel = channel or grpc.aio.insecure_channel(address)
        self._stub = pb_grpc.ExternalProcessorStub(self.channel)

    @contextlib.asynccontextmanager
    async def exchange(self) -> AsyncIterator[Exchange]:
        call = self._stub.Process()
        try:
            yield Exchange(call)
        finally:
            call.cancel()

    async def http(
        self,
        path: str,
        body: bytes,
        headers: Mapping[str, str] | None = None,
        *,
        at: int = 0,
        client: httpx.AsyncClient,
        scheme: str = "http",
    ) -> tuple[Told, httpx.Response | None]:
        """A request all the way: to the processor, with its changes to the `at`-th endpoint that it names, and the
        response back by the processor. The response is None if the processor refused the request."""
        given = {"content-type": "application/json", **(headers or {})}
        async with self.exchange() as exchange:
            told = await exchange.request(path, given, body)
            if told.refusal is not None:
                assert await exchange.read() is None
                return told, None
            sent = {name: value for name, value in {**given, **told.headers}.items() if name not in told.removed}
            served = told.endpoints[at]
            response = await client.post(f"{scheme}://{served}{path}", content=told.body, headers=sent)
            assert await exchange.response(served, response.content) == response.content
            await exchange.ends()
            return told, response

    async def close(self) -> None:
        await self.channel.close()
