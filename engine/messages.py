"""What the gRPC front and the engine process say to each other, over one ZeroMQ pair, as msgpack.

Commands go to the engine, events come back. Progress of a request is reported as deltas: neither side repeats state
that the other already has. Nothing here is pickled.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import msgspec

from common.cache_hints import Retain
from common.metric_relay import Change
from common.sampling import SamplingParams
from common.targets import LatencyTargets
from common.types import FinishReason, KVCacheSpec, SampledToken, WorkerLoad
from kv_store.base import BlockRef


def engine_id_of(request_id: str, number: int) -> str:
    """What the engine calls a request: a worker may get the same id twice."""
    return f"{request_id}#{number}"


def request_id_of(engine_id: str) -> str:
    """The id that a router knows; the same one if nobody has added a number to it."""
    return engine_id.rpartition("#")[0] or engine_id


# ---------------------------------------------------------------------------------------------- commands


class RequestMode(StrEnum):
    LOCAL = "local"  # compute the prompt here, then generate
    PREFILL = "prefill"  # compute the prompt, sample one token, hold the blocks until Release
    REMOTE = "remote"  # wait for the prompt's KV and first token from a prefill worker, then generate


class Pooling(StrEnum):
    """Which hidden states of a prompt make its embedding."""

    LAST = "last"  # the last token's
    MEAN = "mean"  # the mean of all


class Embed(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Asks for a prompt's embedding instead of an answer."""

    request_id: str
    prompt_token_ids: list[int]
    pooling: Pooling
    dimensions: int = 0  # keep so many of the first; 0: all
    normalize: bool = True  # to length 1
    cache_salt: str = ""
    traceparent: str = ""  # as of AddRequest


class AddRequest(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    mode: RequestMode = RequestMode.LOCAL
    cache_salt: str = ""
    retain: Retain | None = None
    tenant: str = ""  # whose share of what may be retained its prompt's blocks take
    priority: int = 0
    targets: LatencyTargets | None = None
    asked_time: float | None = None  # when it came to its router, in seconds of the engine's clock; None: just now
    is_follow_up: bool = False  # a further step of a beam search: it is never refused for being late
    output_token_ids: list[int] = []  # LOCAL and REMOTE: already generated elsewhere, and already with the client
    first_block: int = 0  # PREFILL: first index in the block table that has to be published
    num_lendable_blocks: int = 0  # PREFILL: leading blocks that the decode worker lends if they are not here
    is_part: bool = False  # PREFILL: the prompt goes on elsewhere, after these whole blocks: no token is sampled
    min_remote_tokens: int = 0  # REMOTE: see `common.prefill_place`
    split_at: int = 0  # REMOTE: prompt tokens from this one on are computed here in any case; 0: none
    traceparent: str = ""  # of the front's span, if the request is sampled: it is told of its first steps


class RemoteBlocksPublished(msgspec.Struct, tag=True, frozen=True):
    """REMOTE: the prefill worker holds `blocks` ready; fetch what is missing. `failed_indexes` will never come.
    PREFILL: the same of the decode worker and the blocks that were asked for with `LoanNeeded`."""

    request_id: str
    blocks: list[BlockRef]
    failed_indexes: list[int] = []
    failure: str = ""


class RemoteFirstToken(msgspec.Struct, tag=True, frozen=True):
    """REMOTE: the prompt's first token, already relayed to the client. RemoteBlocksPublished may still follow."""

    request_id: str
    token: SampledToken


class PrefillLeaseEnded(msgspec.Struct, tag=True, frozen=True):
    """REMOTE: the prefill worker ended its stream, and may overwrite what it published. Another one may be asked."""

    request_id: str
    reason: str


class RemotePrefillFailed(msgspec.Struct, tag=True, frozen=True):
    """REMOTE: what has not arrived by now is computed here. Nothing more will be published."""

    request_id: str
    reason: str


class Release(msgspec.Struct, tag=True, frozen=True):
    """The front is done with a request in any state: the request is aborted if it runs, its blocks are freed, and a
    prefill's lease ends. No event follows. Unknown ids are ignored."""

    request_id: str


class StopPrefill(msgspec.Struct, tag=True, frozen=True):
    """Nobody waits for this prefill any more: the engine computes no more of it. Published blocks may still be read, so
    they stay unchanged until `Release`."""

    request_id: str


class AddPeer(msgspec.Struct, tag=True, frozen=True):
    """Bytes of a peer's `KVConnector.describe()`."""

    peer: bytes


class LendBlocks(msgspec.Struct, tag=True, frozen=True):
    """REMOTE, once: the prefill worker lacks the blocks [first, stop) of the prompt. Answered by `BlocksPublished`.
    Those that are here stay as they are until `EndLoan`, whatever becomes of the request."""

    request_id: str
    first: int
    stop: int


class EndLoan(msgspec.Struct, tag=True, frozen=True):
    """The prefill worker does not read the lent blocks any more, or ignores what it reads. Unknown ids are ignored."""

    request_id: str


class GetStatus(msgspec.Struct, tag=True, frozen=True):
    call_id: int


class GetBlocks(msgspec.Struct, tag=True, frozen=True):
    """Answered by `BlocksListed`."""


class CacheAction(StrEnum):
    RETAIN = "retain"  # evict these after others for a time
    EVICT = "evict"  # forget these now, in every tier
    FLUSH = "flush"  # forget all that is on the device or in host memory; the store keeps what it has
    PREFETCH = "prefetch"  # bring these onto the device, when there is time


class HintCache(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Does something with the blocks of these names, a prompt's from its first one on. Answered by `CacheHinted`.
    FLUSH: with all blocks, and none is named."""

    call_id: int
    action: CacheAction
    block_hashes: list[bytes]
    tenant: str = ""  # RETAIN: whose share of what may be retained they take; PREFETCH: whose turn it waits for
    seconds: float = 0.0  # RETAIN: from now on; 0: no longer


class ProfileSteps(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Traces the next `num_steps` steps, or those that come within `timeout_s`, and writes it to `path`: JSON for
    Perfetto, compressed by gzip. Answered by `StepsProfiled`, unless another one or `EndProfile` comes first."""

    call_id: int
    num_steps: int
    timeout_s: float
    path: str


class EndProfile(msgspec.Struct, tag=True, frozen=True):
    """Nobody waits for the trace any more."""


class ShowDebug(msgspec.Struct, tag=True, frozen=True):
    """Whether debug lines are shown; see `common.logs`."""

    is_on: bool


class OrderLevel(msgspec.Struct, tag=True, frozen=True):
    """Which log lines are shown from now on; see `common.logs`."""

    level: str


Command = (
    AddRequest
    | Embed
    | RemoteBlocksPublished
    | RemoteFirstToken
    | PrefillLeaseEnded
    | RemotePrefillFailed
    | Release
    | StopPrefill
    | AddPeer
    | LendBlocks
    | EndLoan
    | GetStatus
    | GetBlocks
    | HintCache
    | ProfileSteps
    | EndProfile
    | ShowDebug
    | OrderLevel
)

# ------------------------------------------------------------------------------------------------ events


class EngineReady(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """First event of an engine that started."""

    spec: KVCacheSpec
    is_read_from_memory: bool  # other workers read what it publishes from its memory, and not from a store
    num_blocks: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: list[int]
    dtype_reason: str  # why the spec's dtype is what it is
    device: str  # "cpu", "cuda" or "cuda:N"
    device_reason: str  # why this device was chosen
    kernels: str = ""  # the variant of the CPU kernels that computes, or torch
    kernels_reason: str = ""  # why this variant was chosen
    peer: bytes  # KVConnector.describe()


class EngineFailed(msgspec.Struct, tag=True, frozen=True):
    """The engine cannot start, or cannot go on. Its process ends after this."""

    message: str


class RemotePrefillNeeded(msgspec.Struct, tag=True, frozen=True):
    """REMOTE: blocks are allocated; ask a prefill worker for those from `first_block` on, and before `stop_block`. The
    prompt's first token is only asked for if `stop_block` is 0: with all blocks."""

    request_id: str
    first_block: int
    stop_block: int = 0


class LoanNeeded(msgspec.Struct, tag=True, frozen=True):
    """PREFILL: ask the decode worker to lend the blocks [first, stop) of the prompt. The request waits for what becomes
    of each (`RemoteBlocksPublished`)."""

    request_id: str
    first: int
    stop: int


class BlocksPublished(msgspec.Struct, tag=True, frozen=True):
    """PREFILL, and REMOTE for what it lends: publish these; `failed_indexes` will never come."""

    request_id: str
    blocks: list[BlockRef]
    failed_indexes: list[int]
    failure: str
    elapsed_s: float  # the connector's: from `publish` to the last of these results


class BlocksFetched(msgspec.Struct, tag=True, frozen=True):
    """These blocks arrived; REMOTE: the front may acknowledge them. `failed_indexes` will be computed here."""

    request_id: str
    indexes: list[int]
    failed_indexes: list[int]
    failure: str
    num_bytes: int
    elapsed_s: float  # the connector's: from `fetch` to the last of these results


class PrefillReceived(msgspec.Struct, tag=True, frozen=True):
    """REMOTE: nothing more is needed from the prefill worker; its stream can end."""

    request_id: str
    time: float  # seconds of the monotonic clock, which all processes of a machine share


class TokensGenerated(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """New tokens. PREFILL gives exactly one, the moment it is sampled, or none of a part that is computed;
    BlocksPublished may still follow."""

    request_id: str
    tokens: list[SampledToken]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    num_cached_tokens: int = 0  # prompt tokens found in this worker's prefix cache or store
    num_preemptions: int = 0
    queue_s: float = 0.0  # from being added to being first scheduled (or, REMOTE, having its blocks allocated)
    num_drafted_tokens: int = 0  # of the answer so far, see `engine.speculation`
    num_accepted_tokens: int = 0
    fallback_reason: str = ""


class StepTraced(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Of a traced request: a step that computed a chunk of its prompt, or its first one after the prompt. Times are
    seconds of the monotonic clock, which all processes of a machine share."""

    request_id: str
    start: float
    end: float
    num_tokens: int  # of the request, in this step
    num_computed_tokens: int  # before it
    num_requests: int  # in this step


class PromptScored(msgspec.Struct, tag=True, frozen=True):
    """LOCAL: logprobs of further tokens of the prompt, from its second one on. All of them come before the first
    TokensGenerated. A request with `output_token_ids` gets none: its client has them."""

    request_id: str
    scores: list[SampledToken]


class Embedded(msgspec.Struct, tag=True, frozen=True):
    """The answer to Embed, once; the request has ended."""

    request_id: str
    values: list[float]  # [hidden_size], or the dimensions that were asked for
    num_cached_tokens: int
    queue_s: float  # from being added to being first scheduled


class RequestFailed(msgspec.Struct, tag=True, frozen=True):
    """The request cannot be served by this engine, through no fault of its own or because it can never fit."""

    request_id: str
    grpc_code: str
    reason: str
    field: str = ""  # of the request, if one is to blame: as its caller wrote it, `sampling_params.seed`


class LoadChanged(msgspec.Struct, tag=True, frozen=True):
    load: WorkerLoad
    counted_requests: tuple[int, ...] = ()  # tags (`request_tag`) of those that came since the load before


class BlocksChanged(msgspec.Struct, tag=True, frozen=True):
    """Names of blocks (16 bytes each) that can be found here from now on, and of those that cannot any more. Each name
    that changed is told at least once, and its last state last."""

    stored: bytes
    removed: bytes


class BlocksListed(msgspec.Struct, tag=True, frozen=True):
    """Names of all blocks that can be found here now, 16 bytes each. Changes that come before it are part of it."""

    names: bytes


class Alive(msgspec.Struct, tag=True, frozen=True):
    """A sign of life, sent if the engine's loop had nothing else to send."""


class MetricsChanged(msgspec.Struct, tag=True, frozen=True):
    """Changes of the metrics that the engine counts (`common.metrics.ENGINE_METRICS`)."""

    changes: list[Change]


class BatchTimeChanged(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """How long the engine's steps take, as far as it has learned it, and how good that is."""

    model: bytes  # `common.batch_time_file`; empty: as before
    source: str  # none, quick, file or learned
    version: int  # of the model
    made_at: float  # seconds of the monotonic clock, which all processes of a machine share
    num_steps: int  # that it was compared with
    error_median: float  # of the latest steps, as shares of their times
    error_p90: float
    drifts: bool  # steps take other times than it says, all the time


class Status(msgspec.Struct, tag=True, frozen=True):
    call_id: int
    load: WorkerLoad
    integrity: str  # "ok", or what is wrong


class CacheHinted(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """What became of a `HintCache`."""

    call_id: int
    # EVICT: how many of the named blocks were on the device; FLUSH: of all. Otherwise: how many leading blocks are.
    num_device_blocks: int = 0
    num_host_blocks: int = 0  # likewise, of blocks that were in host memory alone; PREFETCH: that came from there
    num_stored_blocks: int = 0  # EVICT: that the store had; PREFETCH: that it gave
    failure: str = ""  # EVICT: why the store may still have some; PREFETCH: why not all came


class StepsProfiled(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """The trace that `ProfileSteps` asked for is written, or it failed."""

    call_id: int
    num_steps: int = 0
    seconds: float = 0.0  # from the first of them to the end of the last
    failure: str = ""


Event = (
    EngineReady
    | EngineFailed
    | RemotePrefillNeeded
    | LoanNeeded
    | BlocksPublished
    | BlocksFetched
    | PrefillReceived
    | TokensGenerated
    | StepTraced
    | PromptScored
    | Embedded
    | RequestFailed
    | LoadChanged
    | BlocksChanged
    | BlocksListed
    | Alive
    | MetricsChanged
    | BatchTimeChanged
    | Status
    | CacheHinted
    | StepsProfiled
)

_encoder = msgspec.msgpack.Encoder()
_command_decoder = msgspec.msgpack.Decoder(list[Command])
_event_decoder = msgspec.msgpack.Decoder(list[Event])


def encode(messages: Sequence[Command] | Sequence[Event]) -> bytes:
    return _encoder.encode(messages)


def decode_commands(data: bytes) -> list[Command]:
    return _command_decoder.decode(data)


def decode_events(data: bytes) -> list[Event]:
    return _event_decoder.decode(data)
