"""Traces without OpenTelemetry: which trace a request belongs to, and spans as plain values.

A request's spans are made when it ends, from the times that were noted anyway, and handed over together
(`common.trace_export`). Until then a sampled request costs its ids, and one that is not sampled costs nothing.

`traceparent` and `tracestate` are those of W3C Trace Context (https://www.w3.org/TR/trace-context/).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Protocol

TRACEPARENT, TRACESTATE = "traceparent", "tracestate"
MAX_STATE_CHARS = 512  # longer ones are left out, as the recommendation allows
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_STATE = re.compile(r"[\x20-\x7e]*")

Value = str | bool | int | float | Sequence[str]


@dataclass(slots=True, frozen=True)
class TraceContext:
    """One span of a trace, as others name it."""

    trace_id: str  # 32 hexadecimal digits
    span_id: str  # 16 hexadecimal digits
    is_sampled: bool = True
    state: str = ""  # tracestate, carried along unread

    def child(self) -> TraceContext:
        """A new span of the same trace."""
        return replace(self, span_id=new_span_id())

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{'01' if self.is_sampled else '00'}"


def context_of(traceparent: str, tracestate: str = "") -> TraceContext | None:
    """What a caller says it is part of; None if it says nothing, or nothing that can be understood: as the
    recommendation asks, a trace then begins here."""
    found = _TRACEPARENT.fullmatch(traceparent.strip())
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    if version == "ff" or (version == "00" and more) or not int(trace_id, 16) or not int(span_id, 16):
        return None
    state = tracestate if len(tracestate) <= MAX_STATE_CHARS and _STATE.fullmatch(tracestate) else ""
    return TraceContext(trace_id, span_id, bool(int(flags, 16) & 1), state)


def sampled_context(traceparent: str, tracestate: str = "") -> TraceContext | None:
    """`context_of`, of a caller whose trace is sampled; else None."""
    if not traceparent:
        return None
    context = context_of(traceparent, tracestate)
    return context if context is not None and context.is_sampled else None


def new_trace_id() -> str:
    return _random_hex(16)


def new_span_id() -> str:
    return _random_hex(8)


def _random_hex(num_bytes: int) -> str:
    """Never all zeros, which stands for none."""
    while not (text := os.urandom(num_bytes).hex()).strip("0"):
        pass
    return text


class SpanKind(StrEnum):
    INTERNAL = "internal"
    SERVER = "server"
    CLIENT = "client"


@dataclass(slots=True, kw_only=True)
class Span:
    """Times are seconds of the monotonic clock, which all processes of a machine share."""

    name: str
    context: TraceContext
    parent: TraceContext | None  # None: it is the first of its trace
    start: float
    end: float
    kind: SpanKind = SpanKind.INTERNAL
    attributes: Mapping[str, Value] = field(default_factory=dict)
    events: Sequence[tuple[str, float]] = ()  # names with times
    links: Sequence[TraceContext] = ()
    error: str = ""  # why it failed; empty if it did not


class SpanSink(Protocol):
    """Where spans go."""

    def export(self, spans: Sequence[Span]) -> None:
        """Takes the spans of one request that ended; returns at once."""
        ...


class Traces(SpanSink, Protocol):
    """A process's way to a collector, where requests of clients begin (`common.trace_export`)."""

    def begin(self, traceparent: str = "", tracestate: str = "") -> Traced | None:
        """A new span for a request of a client; None if the request is not sampled."""
        ...


@dataclass(slots=True, frozen=True)
class Traced:
    """The span of one request in this process, and whose child it is."""

    own: TraceContext
    parent: TraceContext | None = None  # None: its trace begins here

    def sibling(self) -> Traced:
        """Of a further answer to the same body. It is a child of the first one if the trace begins with that."""
        return Traced(self.own.child(), self.parent or self.own)


class RequestSpans:
    """Spans of one request in this process, as they become known."""

    def __init__(self, traced: Traced) -> None:
        self.own = traced.own
        self._parent = traced.parent
        self._spans: list[Span] = []

    def add(
        self,
        name: str,
        start: float,
        end: float,
        attributes: Mapping[str, Value] | None = None,
        *,
        context: TraceContext | None = None,
        kind: SpanKind = SpanKind.INTERNAL,
        links: Sequence[TraceContext] = (),
        error: str = "",
    ) -> None:
        """A part of the request. `context`: of the span itself, if others were told of it."""
        span = Span(
            name=name,
            context=context or self.own.child(),
            parent=self.own,
            start=start,
            end=max(start, end),
            kind=kind,
            attributes=attributes or {},
            links=links,
            error=error,
        )
        self._spans.append(span)

    def whole(
        self,
        name: str,
        start: float,
        end: float,
        attributes: Mapping[str, Value],
        events: Sequence[tuple[str, float]] = (),
        error: str = "",
    ) -> list[Span]:
        """All of them, the one of the whole request last: who has that has all that were sent before."""
        span = Span(
            name=name,
            context=self.own,
            parent=self._parent,
            start=start,
            end=max(start, end),
            kind=SpanKind.SERVER,
            attributes=attributes,
            events=events,
            error=error,
        )
        return [*self._spans, span]
