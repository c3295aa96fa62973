"""A collector of OpenTelemetry's: takes spans by OTLP over gRPC and over HTTP, and keeps them."""

from __future__ import annotations

import gzip
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

TIMEOUT_S = 40.0
SERVER = 2  # the kind of a whole request's span


@dataclass(slots=True, frozen=True)
class SeenSpan:
    service: str
    protocol: str  # "grpc" or "http"
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: int
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    links: tuple[str, ...]
    events: tuple[str, ...]
    error: str


@dataclass(slots=True)
class Collector:
    grpc_url: str = ""
    http_url: str = ""
    spans: list[SeenSpan] = field(default_factory=list)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def take(self, request: trace_service_pb2.ExportTraceServiceRequest, protocol: str) -> None:
        with self._changed:
            for one in request.resource_spans:
                service = _values(one.resource.attributes)["service.name"]
                for scope in one.scope_spans:
                    self.spans += [_seen(span, service, protocol) for span in scope.spans]
            self._changed.notify_all()

    def of(self, trace_id: str, services: set[str], num_answers: int = 1) -> list[SeenSpan]:
        """Waits until each of `services` has sent all spans of `num_answers` of this trace; all of the trace."""
        deadline = time.monotonic() + TIMEOUT_S
        with self._changed:
            while True:
                found = [span for span in self.spans if span.trace_id == trace_id]
                ended = Counter(span.service for span in found if span.kind == SERVER)  # each of them comes last
                if all(ended[service] >= num_answers for service in services):
                    return found
                assert self._changed.wait(deadline - time.monotonic()), f"no spans but {self.spans}"


def _seen(span: Any, service: str, protocol: str) -> SeenSpan:
    return SeenSpan(
        service,
        protocol,
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.kind,
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        _values(span.attributes),
        tuple(link.span_id.hex() for link in span.links),
        tuple(event.name for event in span.events),
        span.status.message if span.status.code == 2 else "",
    )


def _values(attributes: Any) -> dict[str, Any]:
    found = {}
    for one in attributes:
        kind = one.value.WhichOneof("value")
        value = getattr(one.value, kind)
        found[one.key] = [each.string_value for each in value.values] if kind == "array_value" else value
    return found


class _Servicer(trace_service_pb2_grpc.TraceServiceServicer):  # type: ignore[misc]
    def __init__(self, collector: Collector) -> None:
        self._collector = collector

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
        self._collector.take(request, "grpc")
        return trace_service_pb2.ExportTraceServiceResponse()


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            assert self.path == "/v1/traces"
            collector.take(trace_service_pb2.ExportTraceServiceRequest.FromString(body), "http")
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = grpc.server(ThreadPoolExecutor(4))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(_Servicer(collector), server)
    collector.grpc_url = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    web = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector.http_url = f"http://127.0.0.1:{web.server_address[1]}"
    thread = threading.Thread(target=web.serve_forever, daemon=True)
    thread.start()
    try:
        yield collector
    finally:
        web.shutdown()
        web.server_close()
        thread.join()
        server.stop(None).wait()
