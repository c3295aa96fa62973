"""`envoy.service.ext_proc.v3.ExternalProcessor`: a stream for each HTTP request of a proxy.

    proxy                                       picker
      request_headers ──>
      request_body ... ──> (full duplex)          the whole request is there: choose
      request_trailers ──>
                       <── request_headers        the choice: a header and metadata; or immediate_response, the end
                       <── request_body ...       as it came
                       <── request_trailers
      response_headers ──>                        who served it
                       <── response_headers
      response_body, response_trailers ──>
                       <── the same

A proxy that does not send bodies in full duplex gets a router chosen by the request's headers alone. One that answers
a request itself may begin with the response at any time.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import cast

import grpc

from common import metrics
from common.errors import BatonError, DeadlineError, InvalidArgumentError, OverloadedError, UnavailableError
from common.grpc.calls import Context, handle_call
from common.grpc.server import add_handlers
from common.grpc.streams import uncancelled
from protos.envoy import external_processor_pb2 as pb
from router.api.endpoint_picker import messages
from router.api.endpoint_picker.messages import MessageError
from router.api.endpoint_picker.picker import Choice, EndpointPicker, HttpRequest
from router.api.grpc_parser import Parser
from router.api.rest.http.error_body import BodyTooLargeError, BodyTooLateError
from router.limits.admission import Admission
from router.limits.gate import Gate, HeldBytes

SERVICE = pb.DESCRIPTOR.services_by_name["ExternalProcessor"]
_PARSE = Parser(pb.ProcessingRequest)
_OUTCOMES: dict[type[BatonError], str] = {OverloadedError: "overloaded", UnavailableError: "unavailable"}

# Go on.
_REQUEST_TRAILERS = pb.ProcessingResponse(request_trailers=pb.TrailersResponse())
_REQUEST_BODY = {
    "request_body": pb.ProcessingResponse(request_body=pb.BodyResponse()),
    "request_trailers": _REQUEST_TRAILERS,
}
_RESPONSE_HEADERS = pb.ProcessingResponse(response_headers=pb.HeadersResponse())
_RESPONSE_BODY = pb.ProcessingResponse(response_body=pb.BodyResponse())
_RESPONSE_TRAILERS = pb.ProcessingResponse(response_trailers=pb.TrailersResponse())


@dataclass(slots=True)
class _Modes:
    """How the proxy sends bodies. One that does not say it does what the protocol asks for."""

    gets_body: bool = True  # the request's comes before its headers are answered
    gives_body: bool = True  # the response's goes back piece by piece

    @classmethod
    def of(cls, first: pb.ProcessingRequest) -> _Modes:
        if not first.HasField("protocol_config"):
            return cls()
        config, full = first.protocol_config, pb.FULL_DUPLEX_STREAMED
        return cls(config.request_body_mode == full, config.response_body_mode == full)


class ExternalProcessorService:
    def __init__(self, picker: EndpointPicker, admission: Admission, gate: Gate) -> None:
        """`gate`: of requests that are read, or chosen for. Their bodies count with those of `admission`."""
        self._picker = picker
        self._admission = admission
        self._gate = gate

    def add_to(self, server: grpc.aio.Server) -> None:
        handler: grpc.RpcMethodHandler[object, object] = grpc.stream_stream_rpc_method_handler(
            self.handle, None, lambda message: cast("pb.ProcessingResponse", message).SerializeToString()
        )
        add_handlers(server, SERVICE.full_name, {"Process": handler})

    async def handle(self, _messages: object, context: Context) -> None:
        await handle_call(context, self._process(context))

    async def _process(self, context: Context) -> None:
        limits = self._gate.limits
        try:
            async with asyncio.timeout(limits.answer_timeout_s + limits.receive_timeout_s):
                await _Stream(self._picker, self._admission, self._gate, context).run()
        except TimeoutError:
            raise DeadlineError("the call took too long") from None


class _Stream:
    """One HTTP request, and the response to it."""

    def __init__(self, picker: EndpointPicker, admission: Admission, gate: Gate, context: Context) -> None:
        self._picker = picker
        self._admission = admission
        self._gate = gate
        self._context = context
        self._modes = _Modes()
        self._choice: Choice | None = None  # that the proxy was told of
        self._has_response = False

    async def run(self) -> None:
        async with asyncio.timeout(self._gate.limits.receive_timeout_s):
            message = await self._next()
        if message is None:
            return
        if message.observability_mode:
            raise MessageError("observability_mode", "is not for an endpoint picker, which has to be heard")
        self._modes = _Modes.of(message)
        try:
            if message.HasField("request_headers"):
                message = await self._request(message)
                if message is None and self._choice is not None:
                    message = await self._next()
            while message is not None:
                await self._answer(message)
                message = await self._next()
        finally:
            if self._choice is not None:
                self._picker.ended(self._choice)

    async def _next(self) -> pb.ProcessingRequest | None:
        """None at the end of the stream."""
        data = await uncancelled(self._context.read())
        if data is grpc.aio.EOF:
            return None
        try:
            return _PARSE(cast("bytes", data))
        except InvalidArgumentError as error:
            raise MessageError(error.field, error.reason) from error

    # -------------------------------------------------------------------------------------------- the request

    async def _request(self, first: pb.ProcessingRequest) -> pb.ProcessingRequest | None:
        """Reads the request, chooses, and tells the proxy. Returns a message that came in between and is none of the
        request's. Without one, and without a choice, the stream ends."""
        headers, arrived_at, outcome = messages.headers_of(first.request_headers), time.monotonic(), "cut"
        path = headers.get(":path", "")
        client, has_known_key = self._picker.client(headers)
        try:
            with self._gate.requests(client.name if client else ""), self._admission.gate.bytes_held() as held:
                body, has_trailers = None, False
                if self._modes.gets_body and not first.request_headers.end_of_stream:
                    chunks: list[bytes] = []
                    last = await self._read_body(chunks, held)
                    if last is None or last.WhichOneof("request") not in _REQUEST_BODY:
                        return last
                    body, has_trailers = b"".join(chunks), last.HasField("request_trailers")
                    del chunks
                asked = HttpRequest(
                    method=headers.get(":method", ""),
                    path=path,
                    headers={name: value for name, value in headers.items() if not name.startswith(":")},
                    body=body,
                    client=client,
                    has_known_key=has_known_key,
                    arrived_at=arrived_at,
                    subset=messages.subset_of(first.metadata_context),
                )
                read_at = time.monotonic()
                self._choice = choice = await self._picker.choose(asked)
                metrics.router_pick.observe(time.monotonic() - read_at)
                async with asyncio.timeout(self._gate.limits.receive_timeout_s):
                    await self._context.write(messages.chosen(choice))
                    if body is not None:
                        for piece in messages.request_body(body, is_end=not has_trailers):
                            await self._context.write(piece)
                        if has_trailers:
                            await self._context.write(_REQUEST_TRAILERS)
                outcome = "workers" if choice.names_workers else "router"
            return None
        except MessageError:
            outcome = "refused"
            raise
        except BatonError as error:
            outcome = _OUTCOMES.get(type(error), "refused")
            await self._context.write(messages.refused(error, headers, path))
            return None
        finally:
            metrics.router_picks.labels(outcome).inc()

    async def _read_body(self, chunks: list[bytes], held: HeldBytes) -> pb.ProcessingRequest | None:
        """Fills `chunks`. Returns the message that ended the body, or one that is none of the request's: the proxy
        answers the request itself. None if the stream has ended."""
        most, num_bytes, timeout_s = self._admission.max_request_bytes(), 0, self._gate.limits.receive_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                while (message := await self._next()) is not None:
                    kind = message.WhichOneof("request")
                    if kind == "request_headers" or kind is None:
                        raise MessageError(kind or "request", "comes where a request's body, or a response, should")
                    if kind != "request_body":
                        return message
                    num_bytes += len(message.request_body.body)
                    if num_bytes > most:
                        metrics.router_refused.labels("body size").inc()
                        raise BodyTooLargeError(f"the body has more than {most} bytes")
                    held.add(len(message.request_body.body))
                    chunks.append(message.request_body.body)
                    if message.request_body.end_of_stream:
                        return message
        except TimeoutError:
            metrics.router_refused.labels("body time").inc()
            raise BodyTooLateError(f"the body did not come within {timeout_s:g} s") from None
        return None

    # -------------------------------------------------------------------------------------------- what follows

    async def _answer(self, message: pb.ProcessingRequest) -> None:
        """Lets the proxy go on. Raises `MessageError`."""
        kind = message.WhichOneof("request") or "request"
        if kind == "response_headers" and not self._has_response:
            self._has_response = True
            if self._choice is not None:
                self._picker.answered(self._choice, messages.served_by(message.metadata_context))
            await self._context.write(_RESPONSE_HEADERS)
        elif kind == "response_body" and self._has_response:
            body = message.response_body
            await self._context.write(messages.response_body(body) if self._modes.gives_body else _RESPONSE_BODY)
        elif kind == "response_trailers" and self._has_response:
            await self._context.write(_RESPONSE_TRAILERS)
        elif kind in _REQUEST_BODY and not self._modes.gets_body:
            await self._context.write(_REQUEST_BODY[kind])
        else:
            raise MessageError(kind, "does not follow what came before")
