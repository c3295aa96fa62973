"""What the scheduler is told, what it decides for one step, and what came of the step. Values only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from common.types import FinishReason, SampledToken
from engine.blocks.host_tier import BlockCopy
from engine.remote_kv import Publish
from engine.request import Request, RequestStatus


@dataclass(slots=True, frozen=True, kw_only=True)
class SchedulerConfig:
    max_num_seqs: int
    max_num_batched_tokens: int
    chunk_size: int  # most tokens of one prompt in one step
    max_model_len: int
    eos_token_ids: frozenset[int]
    queue_policy: Literal["auto", "fcfs", "priority", "slo"] = "fcfs"
    slo_late: Literal["refuse", "best-effort"] = "best-effort"
    preemption_mode: Literal["recompute", "swap"] = "recompute"
    announce: Literal["chunk", "end"] = "chunk"  # end: a prefill's blocks are published only when all are computed
    window: int = 0  # tokens that the layer which sees the most sees, the new one included; 0: all
    handoff_is_store: bool = False  # what a prefill publishes for its decode worker lies in the store


@dataclass(slots=True, frozen=True)
class LateRequest:
    """A request of which nothing is computed yet, and that cannot meet its latency targets any more. Told once of
    each."""

    request: Request
    reason: str
    is_refused: bool  # it has ended; else it goes on as best effort
    cause: Literal["late", "others"] = "late"  # others: it is late after those that it would make late


@dataclass(slots=True)
class SchedulerOutput:
    """What to do in this step. Carry out in the order of the fields."""

    host_copies: list[BlockCopy] = field(default_factory=list)  # of the step, or before it
    publishes: list[Publish] = field(default_factory=list)  # blocks found in the prefix cache
    parts: list[Request] = field(default_factory=list)  # prefills without a token that need no step: they are done
    num_tokens: dict[Request, int] = field(default_factory=dict)  # new tokens of each request in this step
    drafts: dict[Request, list[int]] = field(default_factory=dict)  # tokens that may follow those, to be checked
    preempted: list[Request] = field(default_factory=list)
    displaced: Request | None = None  # one of them, for its place rather than its blocks
    late: list[LateRequest] = field(default_factory=list)
    names: set[bytes] = field(default_factory=set)  # of the full blocks that are computed in this step
    # Of a step that was decided before the last one had ended (`Scheduler.schedule_ahead`): how many new tokens each of
    # its requests has in that one. This step's token comes after those.
    after: dict[Request, int] = field(default_factory=dict)

    @property
    def has_effects(self) -> bool:
        """Whether there is anything to do but to compute."""
        return bool(self.host_copies or self.publishes or self.parts or self.preempted or self.late)

    def start(self, request: Request) -> int:
        """The position of the first token that this step computes of one of its requests."""
        return request.num_computed_tokens + self.after.get(request, 0)

    def drop_ended(self) -> bool:
        """Leaves out requests that were released since they were scheduled. Returns whether there were any."""
        ended = [request for request in self.num_tokens if request.status is not RequestStatus.RUNNING]
        for request in ended:
            del self.num_tokens[request]
            self.drafts.pop(request, None)
        return bool(ended)

    def written_blocks(self, block_size: int) -> dict[int, None]:
        """The blocks that the KV of this step's tokens goes to: a set that keeps its order."""
        block_ids: dict[int, None] = {}
        for request, num_new in self.num_tokens.items():
            start = request.num_computed_tokens + self.after.get(request, 0)
            last = (start + num_new + len(self.drafts.get(request, ())) - 1) // block_size
            block_ids.update(dict.fromkeys(request.block_ids[start // block_size : last + 1]))
        return block_ids


@dataclass(slots=True, frozen=True)
class NewToken:
    request: Request
    token: SampledToken
    finish_reason: FinishReason | None


@dataclass(slots=True)
class StepResult:
    tokens: list[NewToken] = field(default_factory=list)
    parts: list[Request] = field(default_factory=list)  # prefills without a token that are done
    publishes: list[Publish] = field(default_factory=list)
