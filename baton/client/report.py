"""What a client learns about one answer besides its text. Plain values, without protobuf or grpc."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from baton.client.messages import ToolCall, ToolCallDelta
from common.targets import LatencyTargets
from common.types import FinishReason, SampledToken, WorkerRole, WorkerState


@dataclass(slots=True, frozen=True, kw_only=True)
class Usage:
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens whose KV was found in a prefix cache
    reasoning_tokens: int = 0  # completion tokens that are reasoning


@dataclass(slots=True, frozen=True, kw_only=True)
class Timings:
    """Where the time went, in milliseconds. `protos/baton/v1/types.proto` says where each part starts and ends."""

    queue_ms: float = 0.0
    prefill_queue_ms: float = 0.0  # a part of queue_ms
    prefill_ms: float = 0.0
    handoff_ms: float = 0.0
    transfer_ms: float = 0.0  # a part of handoff_ms
    first_decode_ms: float = 0.0
    ttft_ms: float = 0.0
    total_ms: float = 0.0
    tokens_per_second: float = 0.0
    router_queue_ms: float = 0.0  # no part of queue_ms
    tail_ms: float = 0.0  # of a split prompt, between handoff and first token


@dataclass(slots=True, frozen=True, kw_only=True)
class SloReport:
    """What became of a request's latency targets, as its router measured. None: there was no such target."""

    slo_class: str = ""  # empty: none
    targets: LatencyTargets | None = None  # wherever they came from
    tpot_ms: float | None = None  # None if the answer has one token
    ttft_met: bool | None = None
    tpot_met: bool | None = None  # None if the answer has one token, too


@dataclass(slots=True, frozen=True, kw_only=True)
class RequestReport:
    timings: Timings = field(default_factory=Timings)
    prefill_worker: str = ""  # empty if the decode worker prefilled in place
    decode_worker: str = ""
    num_blocks_moved: int = 0
    num_bytes_moved: int = 0
    num_blocks_lent: int = 0  # that the prefill worker read from the decode worker's cache
    fallback_reason: str = ""  # empty if no KV had to be computed a second time
    num_retries: int = 0
    num_hedges: int = 0  # prefill workers asked beside one that was late
    num_hedges_won: int = 0  # those of them that gave something first
    num_migrations: int = 0
    num_preemptions: int = 0
    num_drafted_tokens: int = 0  # of the answer, guessed ahead by the decode worker (--speculation)
    num_accepted_tokens: int = 0  # those of them that the model drew too
    num_handovers: int = 0  # those of num_migrations that were planned, since the worker drained
    notes: tuple[str, ...] = ()  # what was made of the request that its client may not expect
    slo: SloReport | None = None  # None if the request had no latency targets and no class
    num_tail_tokens: int = 0  # of a split prompt: those that the decode worker computed after the prefill worker's
    routing: tuple[str, ...] = ()  # why it went where it went, if the call's metadata asks (x-baton-explain: true)


@dataclass(slots=True, frozen=True)
class Chunk:
    """A piece of an answer as it arrives."""

    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[SampledToken, ...] = ()
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    prompt_logprobs: tuple[SampledToken, ...] = ()  # of further prompt tokens, from the second on
    index: int = 0  # of the answer, if several were asked for


@dataclass(slots=True, frozen=True, kw_only=True)
class Result:
    """A whole answer. `finish_reason` is None if it was cut off."""

    request_id: str
    model: str
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[SampledToken, ...]
    finish_reason: FinishReason | None
    stop_reason: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    prompt_logprobs: tuple[SampledToken, ...] = ()  # of all prompt tokens but the first, before which there is nothing
    cumulative_logprob: float | None = None  # of a beam search: of all tokens together
    usage: Usage
    report: RequestReport


@dataclass(slots=True, frozen=True, kw_only=True)
class FleetWorker:
    """One worker as the router sees it."""

    role: WorkerRole
    address: str
    epoch: str
    state: WorkerState
    num_requests_running: int
    num_requests_waiting: int
    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_leases: int
    integrity: str  # "ok", or what is wrong
    dtype: str = ""  # of weights, activations and KV; empty if the worker never answered
    dtype_reason: str = ""
    device: str = ""  # likewise
    device_reason: str = ""
    kernels: str = ""  # variant of the CPU kernels, or torch; empty if the worker does not say
    kernels_reason: str = ""
    breaker: str = ""  # "closed", "open", "half open" or "slow", to this router
    num_queued_prompt_tokens: int = 0
    num_known_blocks: int = 0  # KV blocks that the router knows it to have
    hit_rate: float = 0.0  # share of prompt tokens found in a prefix cache, of the last minute or so
    tokens_per_second: float = 0.0  # of its answers, likewise
    time_source: str = ""  # where it knows from how long a step takes: none, quick, file, learned; empty: not told
    time_age_s: float = 0.0  # of that knowledge
    time_error_median: float = 0.0  # of the latest steps, as shares of their times
    time_error_p90: float = 0.0
    time_drifts: bool = False  # steps take other times than it says, all the time
    goes_by_slack: bool = False  # computes first what has the least time left to meet its latency targets
    takes: WorkerRole | None = None  # of a worker of both roles: of which it takes work now
    role_pinned: bool = False  # an operator chose that
    num_role_shifts: int = 0  # how often that has changed since the worker started

    @property
    def role_words(self) -> str:
        """Its role; of one that may change it, the role that it takes work of."""
        takes = self.takes or self.role
        role = takes.value if takes is self.role else f"{takes.value} of {self.role.value}"
        return f"{role}, pinned" if self.role_pinned else role


@dataclass(slots=True, frozen=True)
class ModelCard:
    id: str
    max_model_len: int  # tokens, prompt and answer together


class Embeddings(list[list[float]]):
    """A vector for each input, in their order. `usage` is of all inputs together."""

    def __init__(self, vectors: Iterable[list[float]], usage: Usage) -> None:
        super().__init__(vectors)
        self.usage = usage


@dataclass(slots=True, frozen=True)
class PrefixOnWorker:
    """What one worker did with a prompt's KV blocks. Numbers are of blocks that it had."""

    address: str
    num_device_blocks: int
    num_host_blocks: int  # in host memory, and not on the device
    num_stored_blocks: int  # evicting: deleted from the store
    error: str  # why it did nothing, or not all


@dataclass(slots=True, frozen=True)
class Prefix:
    """What became of a prompt's full KV blocks."""

    num_tokens: int
    num_blocks: int
    workers: tuple[PrefixOnWorker, ...]


@dataclass(slots=True, frozen=True, kw_only=True)
class Profile:
    """Where the time of a worker's next steps went."""

    files: Mapping[str, bytes]  # trace.json.gz, engine.svg and front.svg: those that there are
    num_steps: int  # that the trace has; 0: there is none
    seconds: float  # from the first of them to the end of the last
    notes: Sequence[str]  # what is missing, and why
