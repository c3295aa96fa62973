"""What both roles do for the spans of a traced request."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from common.errors import BatonError
from common.tracing import RequestSpans, Span, SpanSink, Value
from engine import messages as m


@contextmanager
def exported(sink: SpanSink, spans_of: Callable[[str], Sequence[Span]]) -> Iterator[None]:
    """Around all work for a request: exports its spans when it ends. `spans_of` takes why it failed, empty if it did
    not."""
    error = "cancelled"
    try:
        yield
        error = ""
    except BatonError as failure:
        error = f"{failure.grpc_code}: {failure.message}"
        raise
    except Exception as failure:
        error = type(failure).__name__
        raise
    finally:
        sink.export(spans_of(error))


def add_step(spans: RequestSpans, step: m.StepTraced, num_prompt_tokens: int | None = None) -> None:
    """A step of the engine. `num_prompt_tokens`: of a request that goes on after its prompt."""
    is_decode = num_prompt_tokens is not None and step.num_computed_tokens >= num_prompt_tokens
    attributes: dict[str, Value] = {
        "baton.process": "engine",
        "baton.num_tokens": step.num_tokens,
        "baton.num_computed_tokens": step.num_computed_tokens,
        "baton.num_requests": step.num_requests,
    }
    spans.add("decode step" if is_decode else "prefill chunk", step.start, step.end, attributes)


def add_transfer(spans: RequestSpans, fetched: m.BlocksFetched, now: float) -> None:
    """Blocks that the connector read, all of which were here at `now`, in seconds of the monotonic clock."""
    attributes: dict[str, Value] = {
        "baton.process": "engine",
        "baton.num_blocks": len(fetched.indexes),
        "baton.num_failed_blocks": len(fetched.failed_indexes),
        "baton.num_bytes": fetched.num_bytes,
    }
    spans.add("transfer", now - fetched.elapsed_s, now, attributes, error=fetched.failure)
