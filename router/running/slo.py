"""Whether a request that has ended met its latency targets, as its router measured."""

from __future__ import annotations

from common.metrics import router_goodput_requests, router_goodput_tokens, router_slo_requests
from protos.baton.v1 import types_pb2
from protos.messages import message_of
from router.limits.targets import NO_CLASS
from router.running.request import GenerationRequest, Progress

# Ways to end in which nobody knows what would have been. Aborted: the client did not read.
_NOT_TO_BLAME = ("cancelled", "aborted", "invalid_argument")


def note_outcome(request: GenerationRequest, progress: Progress, status: str, now: float) -> None:
    """Adds to the report what became of the targets; changes nothing if it is called again. `status`: how the request
    ended, "ok" if well. `now`: when, in seconds of the monotonic clock."""
    slo = request.slo
    if progress.report.HasField("slo") or (slo.targets is None and not slo.slo_class):
        return
    told = types_pb2.SloReport(slo_class=slo.slo_class)
    tpot_ms = progress.tpot_ms
    if tpot_ms is not None:
        told.tpot_ms = tpot_ms
    if slo.targets is not None:
        told.targets.CopyFrom(message_of(slo.targets, types_pb2.LatencyTargets))
        first_at = progress.first_token_at
        first_ms = 1000 * ((now if first_at is None else first_at) - request.arrived_at)
        if slo.targets.ttft_ms is not None and (first_at is not None or first_ms > slo.targets.ttft_ms):
            told.ttft_met = first_ms <= slo.targets.ttft_ms
        if slo.targets.tpot_ms is not None and tpot_ms is not None:
            told.tpot_met = tpot_ms <= slo.targets.tpot_ms
        if status not in ("ok", *_NOT_TO_BLAME):
            _fail(told)
    progress.report.slo.CopyFrom(told)


def exceeds(request: GenerationRequest, progress: Progress, factor: float, now: float) -> bool:
    """Whether the request took longer than `factor` times one of its targets. Without a first token it took as long as
    until `now`, in seconds of the monotonic clock."""
    targets = request.slo.targets
    if targets is None:
        return False
    first_at, tpot_ms = progress.first_token_at, progress.tpot_ms
    first_ms = 1000 * ((now if first_at is None else first_at) - request.arrived_at)
    is_late = targets.ttft_ms is not None and first_ms > factor * targets.ttft_ms
    return is_late or (targets.tpot_ms is not None and tpot_ms is not None and tpot_ms > factor * targets.tpot_ms)


def _fail(told: types_pb2.SloReport) -> None:
    """An answer that failed did not come in time: only a first token that did counts."""
    if told.targets.HasField("ttft_ms") and not told.HasField("ttft_met"):
        told.ttft_met = False
    if told.targets.HasField("tpot_ms"):
        told.tpot_met = False


def count_outcome(progress: Progress, status: str) -> None:
    """Counts what `note_outcome` has found, of a request that has a report of it."""
    slo = progress.report.slo
    slo_class, ttft, tpot = slo.slo_class or NO_CLASS, _word(slo, "ttft_met"), _word(slo, "tpot_met")
    router_slo_requests.labels(slo_class, ttft, tpot).inc()
    if status == "ok" and slo.HasField("targets") and "missed" not in (ttft, tpot):
        router_goodput_requests.labels(slo_class).inc()
        router_goodput_tokens.labels(slo_class).inc(progress.usage.completion_tokens)


def _word(slo: types_pb2.SloReport, field: str) -> str:
    """As metrics and the log say it."""
    return "none" if not slo.HasField(field) else "met" if getattr(slo, field) else "missed"  # type: ignore[arg-type]


def facts_of(slo: types_pb2.SloReport) -> dict[str, str | float]:
    """What the log and spans say of a request's targets."""
    facts: dict[str, str | float] = {"slo_class": slo.slo_class} if slo.slo_class else {}
    for name in ("ttft", "tpot"):
        if slo.targets.HasField(f"{name}_ms"):  # type: ignore[arg-type]
            facts[f"{name}_target_ms"] = getattr(slo.targets, f"{name}_ms")
            facts[f"{name}_target"] = _word(slo, f"{name}_met")
    return facts
