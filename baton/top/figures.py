"""What `baton top` shows, made of what a router tells. Pure; time comes in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.client.report import FleetWorker
from common.finished_request import FinishedRequest
from common.percentiles import middle_and_late
from common.types import WorkerRole, WorkerState

RECENT_S = 10.0  # for which requests count that have ended
MAX_REQUESTS = 512  # that a router keeps

BARS = " ▏▎▍▌▋▊▉█"
WORKER_COLUMNS = (
    "role", "address", "state", "running", "waiting", "to compute", "KV in use", "", "cached", "tokens/s", "hits",
    "breaker",
)  # fmt: skip
REQUEST_COLUMNS = (
    "came", "request", "client", "ended", "prompt", "cached", "tokens", "first token", "per token", "total", "prefill",
    "decode",
)  # fmt: skip


@dataclass(slots=True, frozen=True)
class Summary:
    """The line at the top."""

    num_workers: int
    num_ready: int
    num_running: int  # on decode workers, so that no request counts twice
    num_waiting: int
    requests_per_s: float  # that ended
    tokens_per_s: float  # of those
    num_failed: int
    ttft_ms: tuple[float | None, float | None]  # median and 95th percentile
    tpot_ms: tuple[float | None, float | None]

    def in_words(self) -> str:
        failed = f", {self.num_failed} failed" if self.num_failed else ""
        return (
            f"{self.num_ready} of {self.num_workers} workers ready · "
            f"{self.num_running} running, {self.num_waiting} waiting · "
            f"{self.requests_per_s:.1f} requests/s{failed}, {self.tokens_per_s:.0f} tokens/s · "
            f"first token {_pair(self.ttft_ms)} · per token {_pair(self.tpot_ms)}"
        )


def summary(workers: Sequence[FleetWorker], requests: Sequence[FinishedRequest], now: float) -> Summary:
    """`now` in seconds since 1970, by the router's clock. `requests` count that ended in the last `RECENT_S`
    seconds."""
    recent = [one for one in requests if now - RECENT_S <= ended_at(one)]
    span_s = RECENT_S
    if len(recent) == len(requests) >= MAX_REQUESTS:  # more ended than the router keeps
        span_s = max(now - min(map(ended_at, recent)), 0.1)
    well = [one for one in recent if one.status == "ok"]
    decoding = [one for one in workers if one.role is not WorkerRole.PREFILL]
    return Summary(
        num_workers=len(workers),
        num_ready=sum(one.state is WorkerState.READY for one in workers),
        num_running=sum(one.num_requests_running for one in decoding),
        num_waiting=sum(one.num_requests_waiting for one in workers),
        requests_per_s=len(recent) / span_s,
        tokens_per_s=sum(one.output_tokens for one in recent) / span_s,
        num_failed=len(recent) - len(well) - sum(one.status == "cancelled" for one in recent),
        ttft_ms=middle_and_late([one.ttft_ms for one in well if one.ttft_ms is not None]),
        tpot_ms=middle_and_late([tpot for one in well if (tpot := tpot_ms(one)) is not None]),
    )


def ended_at(request: FinishedRequest) -> float:
    return request.time + request.total_ms / 1000


def tpot_ms(request: FinishedRequest) -> float | None:
    """Mean time between two tokens; None if there are not two."""
    if request.ttft_ms is None or request.output_tokens < 2:
        return None
    return (request.total_ms - request.ttft_ms) / (request.output_tokens - 1)


def worker_row(worker: FleetWorker) -> tuple[str, ...]:
    """In the order of `WORKER_COLUMNS`."""
    num_owned = worker.num_blocks - worker.num_free_blocks - worker.num_cached_blocks
    owned = num_owned / worker.num_blocks if worker.num_blocks else 0.0
    return (
        worker.role_words,
        worker.address,
        worker.state.value,
        str(worker.num_requests_running),
        str(worker.num_requests_waiting),
        str(worker.num_queued_prompt_tokens),
        f"{owned:.0%}",
        bar(owned, 10),
        str(worker.num_cached_blocks),
        f"{worker.tokens_per_second:.1f}",
        f"{worker.hit_rate:.0%}",
        worker.breaker,
    )


def request_row(request: FinishedRequest, came: str) -> tuple[str, ...]:
    """In the order of `REQUEST_COLUMNS`. `came`: the time of day."""
    return (
        came,
        request.request_id[:12],
        request.client,
        request.finish_reason if request.status == "ok" else request.status,
        str(request.prompt_tokens),
        str(request.cached_tokens),
        str(request.output_tokens),
        millis(request.ttft_ms),
        millis(tpot_ms(request)),
        millis(request.total_ms),
        request.prefill_worker or "in place",
        request.decode_worker,
    )


def matches(request: FinishedRequest, words: str) -> bool:
    """Whether any text of the request has `words` in it."""
    texts = (
        request.request_id, request.client, request.model, request.status, request.finish_reason, request.reason,
        request.prefill_worker, request.decode_worker,
    )  # fmt: skip
    return any(words.lower() in text.lower() for text in texts)


def bar(share: float, width: int) -> str:
    """`width` columns; an eighth of one is the smallest thing drawn."""
    eighths = round(min(max(share, 0.0), 1.0) * width * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (BARS[rest] if rest else "")).ljust(width)


def millis(ms: float | None) -> str:
    if ms is None:
        return "-"
    return f"{ms / 1000:.1f} s" if ms >= 10_000 else f"{ms:.0f} ms" if ms >= 100 else f"{ms:.1f} ms"


def _pair(values: tuple[float | None, float | None]) -> str:
    middle, late = values
    return "-" if middle is None else f"{millis(middle)} (p95 {millis(late)})"
