"""Spans that both roles make of what their engine tells of a traced request."""

from __future__ import annotations

from common.tracing import RequestSpans, Value
from engine import messages as m


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
