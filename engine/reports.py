"""What the engine's pure parts counted and noticed, as metrics and log lines."""

from __future__ import annotations

import logging

from common import metrics
from engine.blocks.counts import CacheCounts
from engine.remote_kv import Settled
from engine.request import Request
from engine.scheduling.schedule import LateRequest

log = logging.getLogger(__name__)


def report_counts(counts: CacheCounts) -> None:
    """Adds these to the metrics."""
    for tier, number in (
        ("device", counts.device_hits),
        ("host", counts.host_hits),
        ("store", counts.store_hits),
        ("decode", counts.lent_hits),
    ):
        metrics.worker_kv_cache_hits.labels(tier).inc(number)
    for move in ("demoted", "promoted", "swapped_out", "stored", "dropped"):
        metrics.worker_kv_tier_moves.labels(move).inc(getattr(counts, move))
    for event in ("retained", "outbid", "yielded"):
        metrics.worker_kv_retentions.labels(event).inc(getattr(counts, event))


def report_retained(num_blocks: int) -> None:
    metrics.worker_kv_retained_blocks.set(num_blocks)


def report_draft(num_drafted: int, num_accepted: int) -> None:
    """Tokens of one checked draft."""
    metrics.worker_draft_tokens.labels("accepted").inc(num_accepted)
    metrics.worker_draft_tokens.labels("refused").inc(num_drafted - num_accepted)


def report_given_up(why: str) -> None:
    metrics.worker_steps_given_up.labels(why).inc()


def report_preempted(request: Request, *, is_displaced: bool) -> None:
    """`is_displaced`: a request with latency targets needed its place, not its blocks."""
    metrics.worker_preemptions.inc()
    extra = {"request_id": request.request_id, "num_preemptions": request.num_preemptions}
    if is_displaced:
        log.info("preempted: a request with latency targets gets its place; raise --max-num-seqs", extra=extra)
        return
    log.warning(
        "preempted: KV blocks ran out; raise --kv-cache-memory-gb or --num-blocks, or lower --max-num-seqs", extra=extra
    )


def report_late(late: LateRequest) -> None:
    metrics.worker_late_requests.labels("refused" if late.is_refused else "best_effort", late.cause).inc()
    log.info(
        "a request cannot meet its latency targets any more",
        extra={
            "request_id": late.request.request_id,
            "cause": late.cause,
            "reason": late.reason,
            "refused": late.is_refused,
        },
    )


def report_order(*, goes_by_slack: bool) -> None:
    metrics.worker_goes_by_slack.set(goes_by_slack)
    log.debug("the order of requests has changed", extra={"by_slack": goes_by_slack})


def report_settled(settled: Settled) -> None:
    """A request's wait for KV is over: says so if not all has come."""
    request = settled.request
    if settled.starts_again:
        return
    if request.fallback_reason:
        metrics.worker_fallbacks.inc()
        log.warning(
            "remote KV did not arrive, computing it here",
            extra={
                "request_id": request.request_id,
                "reason": request.fallback_reason,
                "num_computed_tokens": request.num_computed_tokens,
                "num_prompt_tokens": request.num_prompt_tokens,
            },
        )
    elif settled.num_not_lent:
        log.warning(
            "what its decode worker lends did not arrive, computing it here",
            extra={
                "request_id": request.request_id,
                "reason": settled.lost_reason,
                "num_blocks": settled.num_not_lent,
            },
        )
    elif settled.lost_reason:  # a lookup is a hint: what has gone since is computed like any other token
        log.info("stored KV was gone", extra={"request_id": request.request_id, "reason": settled.lost_reason})


def report_not_stored(reason: str) -> None:
    log.warning("the store does not take computed KV", extra={"reason": reason})


def report_unreachable(reason: str) -> None:
    log.warning("cannot reach a peer's KV cache", extra={"reason": reason})
