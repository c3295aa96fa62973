"""What an answer tells of its own times if it is asked to: vLLM's fields with vLLM's meanings, and Baton's own."""

from __future__ import annotations

from collections.abc import Sequence

from protos.baton.v1 import types_pb2
from router.running.request import Output


def answer_metrics(lasts: Sequence[Output | None]) -> dict[str, object] | None:
    """`lasts`: the last output of each choice. None for several choices, whose times are each its own, as in vLLM."""
    if len(lasts) != 1 or (last := lasts[0]) is None or last.report is None or last.usage is None:
        return None
    report, usage, timings = last.report, last.usage, last.report.timings
    num_tokens = usage.completion_tokens
    queue_ms = timings.router_queue_ms + timings.queue_ms
    generation_ms = timings.total_ms - timings.ttft_ms
    inference_ms = timings.total_ms - queue_ms
    return {
        # vLLM's: the time to the first token is counted from when the request was scheduled.
        "time_to_first_token_ms": _ms(max(timings.ttft_ms - queue_ms, 0.0)),
        "generation_time_ms": _ms(generation_ms),
        "queue_time_ms": _ms(queue_ms),
        "mean_itl_ms": _ms(generation_ms / (num_tokens - 1)) if num_tokens > 1 else None,
        "tokens_per_second": _ms(1000 * num_tokens / inference_ms) if inference_ms > 0 else None,
        # Baton's: from when the request came.
        "ttft_ms": _ms(timings.ttft_ms),
        "total_ms": _ms(timings.total_ms),
        "prefill_ms": _ms(timings.prefill_ms),
        "handoff_ms": _ms(timings.handoff_ms),
        "first_decode_ms": _ms(timings.first_decode_ms),
        "prefill_worker": report.prefill_worker or None,
        "decode_worker": report.decode_worker,
        "cached_tokens": usage.cached_tokens,
        "acceptance_rate": _acceptance(report),
        "slo_class": report.slo.slo_class or None,
        "ttft_met": report.slo.ttft_met if report.slo.HasField("ttft_met") else None,
        "tpot_met": report.slo.tpot_met if report.slo.HasField("tpot_met") else None,
    }


def _acceptance(report: types_pb2.RequestReport) -> float | None:
    """Share of the drafted tokens that the model drew, too; None if none was drafted."""
    return round(report.num_accepted_tokens / report.num_drafted_tokens, 4) if report.num_drafted_tokens else None


def _ms(value: float) -> float:
    return round(value, 3)
