"""A request that ended, as routers tell of it: `GET /requests` and `RouterService.GetRequests`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, frozen=True, kw_only=True)
class Stage:
    """A stretch of a request's time, in milliseconds since the request came. Stages of workers are placed by their
    lengths, since workers tell no times of day: each begins where the one before it ends."""

    name: str = ""
    where: str = ""  # a worker's address, or "router"
    start_ms: float = 0.0
    end_ms: float = 0.0


@dataclass(slots=True, frozen=True, kw_only=True)
class FinishedAttempt:
    """One call of a decode worker, or of the one that makes an embedding, in milliseconds since the request came."""

    cause: str = ""  # "new", "retry", "migration", "handover" or "resumed"
    decode_worker: str = ""
    start_ms: float = 0.0
    end_ms: float = 0.0
    first_token_ms: float | None = None
    failure: str = ""  # why another one followed; empty for the last one


@dataclass(slots=True, frozen=True, kw_only=True)
class FinishedRequest:
    """One answer that ended, well or not. Fields are those of `GET /requests`; nothing of a text but its length."""

    request_id: str = ""
    trace_id: str = ""  # of its OpenTelemetry trace; empty if it was not sampled
    time: float = 0.0  # when it came, in seconds since 1970
    client: str = ""  # name of the API key
    model: str = ""
    operation: str = ""  # "chat", "text_completion" or "embeddings"
    status: str = ""  # "ok", or how it failed: the words of `baton_router_requests_total`
    reason: str = ""  # why it failed
    finish_reason: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    decode_worker: str = ""
    prefill_worker: str = ""  # empty if the decode worker prefilled in place
    ttft_ms: float | None = None  # None if no token came
    total_ms: float = 0.0
    router_queue_ms: float = 0.0
    queue_ms: float = 0.0  # this and the next seven: `Timings` of the answer's report
    prefill_queue_ms: float = 0.0
    prefill_ms: float = 0.0
    handoff_ms: float = 0.0
    transfer_ms: float = 0.0
    tail_ms: float = 0.0
    first_decode_ms: float = 0.0
    tokens_per_second: float = 0.0
    num_retries: int = 0
    num_migrations: int = 0
    num_handovers: int = 0
    num_hedges: int = 0
    num_hedges_won: int = 0
    num_preemptions: int = 0
    num_blocks_moved: int = 0
    num_bytes_moved: int = 0
    num_blocks_lent: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    fallback_reason: str = ""
    tpot_ms: float | None = None  # mean time from one token to the next; None if there are not two
    slo_class: str = ""  # this and the next four: `SloReport` of the answer's report
    ttft_target_ms: float | None = None  # None: it had no such target
    tpot_target_ms: float | None = None
    ttft_met: bool | None = None
    tpot_met: bool | None = None
    attempts: tuple[FinishedAttempt, ...] = ()
    stages: tuple[Stage, ...] = ()
