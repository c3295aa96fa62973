"""A worker as a router sees it."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from common.batch_time import BatchTime
from common.types import WorkerLoad, WorkerRole, WorkerState


@dataclass(slots=True, frozen=True)
class RoleTaken:
    """What a worker of both roles said of the work that it takes now."""

    role: WorkerRole
    num_shifts: int = 0  # how often that has changed since it started
    is_pinned: bool = False  # by an operator


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """One worker at one instant: what it said about itself, and what this router has sent it since.

    `role` is what this router may use it for: as configured, or what a worker of both roles takes now. `excluded` says
    why it must not be used although it can be reached, and is empty if nothing speaks against it.
    """

    worker_id: str
    role: WorkerRole
    address: str
    taken: RoleTaken | None = None  # None: it has but one role, or is of a version that keeps both
    has_both: bool = False  # the router may use it for both roles, whatever it takes now
    epoch: str = ""
    fingerprint: str = ""
    block_size: int = 0  # tokens per KV block
    parameters: frozenset[str] = frozenset()  # of sampling, that it knows
    max_model_len: int | None = None  # tokens of a request, prompt and answer; None if it has not said it
    batch_time: BatchTime | None = None  # how long its steps take; None if it has not said it, or is not sure yet
    splits: bool = False  # it knows prompts that are computed in two parts, by two workers
    load: WorkerLoad = WorkerLoad()
    state: WorkerState = WorkerState.UNREACHABLE
    excluded: str = ""
    suspended: str = ""  # why it is used only if no other is left; empty if it is as good as any
    num_unreported: int = 0  # requests sent by this router that `load` does not count yet
    num_unreported_tokens: int = 0  # prompt tokens that the worker computes for them
    # Of these tokens, those of prompts that had to begin within each of `SLACKS_S` when they were sent, to be in time:
    # as `WorkerLoad.queued_by_slack`. Empty: nobody knows, all may have to.
    unreported_by_slack: tuple[int, ...] = ()
    num_unreported_context: int = 0  # tokens that unreported requests begin with, whoever computes their KV

    @property
    def can_prefill(self) -> bool:
        return self.role is not WorkerRole.DECODE

    @property
    def can_decode(self) -> bool:
        return self.role is not WorkerRole.PREFILL

    @property
    def may_go_on_decoding(self) -> bool:
        """Whether it takes prompts alone, and could have the whole answer."""
        return self.role is WorkerRole.PREFILL and self.has_both

    @property
    def incarnation(self) -> tuple[str, str]:
        """Differs for a restarted worker, so that a request that gave up on the old process may try the new one."""
        return (self.address, self.epoch)
