"""Hands spans to OpenTelemetry, which sends them by OTLP. Imported by a process that traces, and by no other.

All of OpenTelemetry's own variables hold (`OTEL_EXPORTER_OTLP_HEADERS`, `OTEL_RESOURCE_ATTRIBUTES`, `OTEL_BSP_*`, ...).
Spans are made here from times that have passed, so `ReadableSpan` is filled in directly: a tracer would take times and
ids of its own.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from opentelemetry.context import Context
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import Event, ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, Sampler, TraceIdRatioBased
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context
from opentelemetry.trace import SpanKind as OtelKind
from opentelemetry.trace.span import TraceState
from opentelemetry.trace.status import Status, StatusCode

from common import metrics
from common.tracing import Span, SpanKind, TraceContext, Traced, context_of, new_span_id, new_trace_id
from common.version import VERSION

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_MS = 2000  # for what is left at the end
_SCOPE = InstrumentationScope("baton", VERSION)
_KINDS = {SpanKind.INTERNAL: OtelKind.INTERNAL, SpanKind.SERVER: OtelKind.SERVER, SpanKind.CLIENT: OtelKind.CLIENT}


class TraceExport:
    """One process's way to a collector. Spans are sent in batches by a thread; while the collector is away, a bounded
    number of them waits (`OTEL_BSP_MAX_QUEUE_SIZE`) and the rest is dropped with a warning."""

    def __init__(self, exporter: SpanExporter, service: str, instance: str = "", sample: float | None = None) -> None:
        """`service`, `instance`: this process, if the environment does not say other names. `sample`: the share of
        traces that begin here and are kept; if None, as `OTEL_TRACES_SAMPLER` says, or all."""
        names = {"service.name": service} | ({"service.instance.id": instance} if instance else {})
        self._resource = Resource.create(names).merge(OTELResourceDetector().detect())
        self._sampler: Sampler = _sampler(sample)
        self._processor = BatchSpanProcessor(_Counted(exporter))

    def begin(self, traceparent: str = "", tracestate: str = "") -> Traced | None:
        """A new span for a request of a client; None if the request is not sampled."""
        parent = context_of(traceparent, tracestate) if traceparent else None
        trace_id = new_trace_id() if parent is None else parent.trace_id
        around = None if parent is None else set_span_in_context(NonRecordingSpan(_context(parent, is_remote=True)))
        result = self._sampler.should_sample(around or Context(), int(trace_id, 16), "request")
        if not result.decision.is_sampled():
            return None
        return Traced(TraceContext(trace_id, new_span_id(), state="" if parent is None else parent.state), parent)

    def export(self, spans: Sequence[Span]) -> None:
        metrics.trace_spans.labels("made").inc(len(spans))
        offset_ns = time.time_ns() - time.monotonic_ns()  # one for all spans of a request: none overtakes another
        for span in spans:
            self._processor.on_end(self._readable(span, offset_ns))

    def _readable(self, span: Span, offset_ns: int) -> ReadableSpan:
        return ReadableSpan(
            name=span.name,
            context=_context(span.context),
            parent=None if span.parent is None else _context(span.parent),
            resource=self._resource,
            attributes=dict(span.attributes),
            events=[Event(name, timestamp=_at(when, offset_ns)) for name, when in span.events],
            links=[Link(_context(link)) for link in span.links],
            kind=_KINDS[span.kind],
            status=Status(StatusCode.ERROR, span.error) if span.error else Status(StatusCode.UNSET),
            start_time=_at(span.start, offset_ns),
            end_time=_at(span.end, offset_ns),
            instrumentation_scope=_SCOPE,
        )

    def close(self) -> None:
        """Sends what is left, for a short while. Blocks."""
        self._processor.force_flush(CLOSE_TIMEOUT_MS)
        self._processor.shutdown()


class _Counted:
    """A `SpanExporter` around another one, and how many spans it has sent. Called by the processor's thread."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        outcome = "failed"
        try:
            result = self._exporter.export(spans)
            if result is SpanExportResult.SUCCESS:
                outcome = "sent"
            return result
        finally:
            metrics.trace_spans.labels(outcome).inc(len(spans))

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return bool(self._exporter.force_flush(timeout_millis))


def _sampler(sample: float | None) -> Sampler:
    if sample is None:
        return TracerProvider().sampler  # as the environment says
    return ParentBased(TraceIdRatioBased(sample))


def _context(context: TraceContext, *, is_remote: bool = False) -> SpanContext:
    return SpanContext(
        trace_id=int(context.trace_id, 16),
        span_id=int(context.span_id, 16),
        is_remote=is_remote,
        trace_flags=TraceFlags(TraceFlags.SAMPLED if context.is_sampled else TraceFlags.DEFAULT),
        trace_state=TraceState.from_header([context.state]) if context.state else None,
    )


def _at(seconds: float, offset_ns: int) -> int:
    return int(seconds * 1e9) + offset_ns


def grpc_exporter(endpoint: str | None) -> SpanExporter:
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter() if endpoint is None else OTLPSpanExporter(endpoint=endpoint)


def http_exporter(endpoint: str | None) -> SpanExporter:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter() if endpoint is None else OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces")
