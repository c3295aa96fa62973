"""One request as the engine sees it. All of its state lives here; the scheduler and block manager only act on it."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from common.cache_hints import Retain
from common.sampling import SamplingParams
from common.targets import LatencyTargets
from common.types import PRIORITY_S, FinishReason
from engine.messages import Embed, RequestMode
from engine.sampling.logit_changes import LogitChanges
from engine.scheduling.pace import Pace
from engine.speculation.record import DraftRecord

if TYPE_CHECKING:
    from engine.sampling.guide import Guide


class RequestStatus(StrEnum):
    WAITING = "waiting"
    WAITING_FOR_GRAMMAR = "waiting_for_grammar"  # not in the queue yet
    WAITING_FOR_REMOTE_KV = "waiting_for_remote_kv"  # blocks allocated, bytes on their way
    RUNNING = "running"
    PREEMPTED = "preempted"  # lost its blocks; its tokens will be computed again
    SWAPPED = "swapped"  # its blocks are in host memory
    FINISHED_STOPPED = "finished_stopped"
    FINISHED_LENGTH = "finished_length"
    FINISHED_ABORTED = "finished_aborted"
    FINISHED_LEASED = "finished_leased"  # a prefill that computes no more; its blocks are held until it is released


def block_table(block_ids: Iterable[int] = ()) -> array[int]:
    return array("i", block_ids)


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """Progress is one number: the scheduler lets `num_computed_tokens` catch up with `num_tokens`.

    token_ids      | prompt                         | output            |
                   0                    num_prompt_tokens      num_tokens
    KV             | computed (cached, fetched or own)  |  to compute   |
                   0                     num_computed_tokens
    block_ids      | 0 | 1 | 2 | ...                 (may reach further than computed)
    """

    request_id: str
    token_ids: list[int]  # prompt, then output
    num_prompt_tokens: int
    sampling_params: SamplingParams
    arrival_time: float  # seconds, on the clock that the caller passes everywhere
    mode: RequestMode = RequestMode.LOCAL
    extra_keys: tuple[str, ...] = ()
    retain: Retain | None = None
    tenant: str = ""  # whose share of what may be retained its prompt's blocks take
    priority: int = 0  # lower is sooner
    targets: LatencyTargets | None = None
    age_s: float = 0.0  # time from its arrival at its router to `arrival_time`
    is_follow_up: bool = False  # a further step of a beam search: it is never refused for being late
    first_block: int = 0  # PREFILL: first index that the decode worker lacks
    num_lendable_blocks: int = 0  # PREFILL: leading blocks that the decode worker lends if they are not here
    is_part: bool = False  # PREFILL: the prompt goes on elsewhere, after these whole blocks: no token is sampled
    min_remote_tokens: int = 0  # REMOTE: see `common.prefill_place`
    split_at: int = 0  # REMOTE: prompt tokens from this one on are computed here in any case; 0: none
    status: RequestStatus = RequestStatus.WAITING
    num_computed_tokens: int = 0
    num_pending: int = 0  # tokens that a step on the device draws for this request, unknown until the step ends
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache or store when first admitted
    block_ids: array[int] = field(default_factory=block_table)  # int32, as attention reads it
    host_block_ids: list[int] = field(default_factory=list)  # while SWAPPED
    block_hashes: list[bytes] = field(default_factory=list)  # names of the full blocks of token_ids
    num_named_blocks: int = 0  # leading blocks of block_ids that name_computed has seen
    num_unseen_blocks: int = 0  # leading places of block_ids whose blocks were given up: no layer sees them any more
    unseen_since: int = 0  # when it first gave one of them up, on the block manager's own count
    num_stored_blocks: int = 0  # leading blocks that the store held when the request came; a hint, used once
    num_published_blocks: int = 0  # PREFILL: blocks before this index are published or not needed
    num_preemptions: int = 0
    num_given_up: int = 0  # steps with it that ended early for a request in a hurry
    scheduled_time: float | None = None  # first admitted
    pace: Pace | None = None  # while requests go by slack
    fallback_reason: str = ""
    stop_token_id: int | None = None
    embed: Embed | None = None  # asks for an embedding of the prompt instead of an answer
    pooled: list[float] = field(default_factory=list)  # sum of the hidden states so far
    needs_every_token: bool = False  # computes the whole prompt, whatever is cached
    num_unscored_tokens: int = 0  # at the prompt's end, whose logprobs are asked for and are not known yet
    changes_logits: bool = field(init=False)  # as its parameters say
    changes: LogitChanges | None = None  # made when its first token is sampled
    guide: Guide | None = None  # of a guided request, once its grammar is compiled
    drafts: DraftRecord = field(default_factory=DraftRecord)

    def __post_init__(self) -> None:
        self.changes_logits = self.sampling_params.changes_logits

    @property
    def queue_time(self) -> float:
        """Arrival time, moved by the priority. It never changes, so a waiting request is not overtaken by requests that
        come long after it, and none starves."""
        return self.arrival_time + PRIORITY_S * self.priority

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.token_ids[: self.num_prompt_tokens]

    @property
    def num_remote_tokens(self) -> int:
        """REMOTE: leading tokens of the prompt that a prefill worker may compute."""
        return min(self.split_at or self.num_prompt_tokens, self.num_prompt_tokens)

    @property
    def num_missing_tokens(self) -> int:
        """Tokens whose KV has to be computed before the next token can be sampled."""
        return len(self.token_ids) - self.num_computed_tokens

    def logit_changes(self, eos_token_ids: frozenset[int]) -> LogitChanges | None:
        """What changes the logits of the next token, up to date; None for a request that wants them as they are."""
        if not self.changes_logits:
            return None
        if self.changes is None:
            self.changes = LogitChanges(self.sampling_params, self.prompt_token_ids, eos_token_ids)
        self.changes.follow(self.token_ids, self.num_prompt_tokens)
        return self.changes

    def append(self, token_id: int, eos_token_ids: frozenset[int], max_model_len: int) -> FinishReason | None:
        """Adds a generated token; says why the request is finished with it, if it is."""
        self.token_ids.append(token_id)
        params = self.sampling_params
        if self.num_output_tokens >= params.min_tokens:
            if token_id in params.stop_token_ids:
                self.stop_token_id = token_id
                return FinishReason.STOP
            if token_id in eos_token_ids and not params.ignore_eos:
                return FinishReason.STOP
        if self.num_output_tokens >= params.max_tokens or self.num_tokens >= max_model_len:
            return FinishReason.LENGTH
        return None
