"""What the autoscaler sees of the fleet at one instant, and what it decides. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from common.types import WorkerRole

ROLES = (WorkerRole.PREFILL, WorkerRole.DECODE)


class WorkerTime(Protocol):
    """How long a worker takes."""

    def prompt_s(self, num_tokens: float) -> float:
        """Seconds to compute a prompt of so many tokens, of which none is cached."""
        ...

    def decode_s(self, num_requests: float, context: float, /) -> float:
        """Seconds of a step that gives a token to each of `num_requests`, which attend to `context` tokens each."""
        ...


@dataclass(slots=True, frozen=True, kw_only=True)
class RoleSignals:
    """One role's workers. Sums are over the workers that report; `num_silent` more are there but do not.

    A worker of both roles counts in those that it takes work of, or in both if it does not say. One that drains counts
    in neither: its load is leaving.
    """

    num_ready: int = 0
    num_fixed: int = 0  # of those that are ready: they have this role alone, and never take work of the other
    num_silent: int = 0
    num_requests: int = 0  # running and waiting
    queued_tokens: int = 0  # prompt tokens whose KV is not computed yet
    num_busy: int = 0  # workers that have some
    predicted_rate: float | None = (
        None  # prompt tokens/s of one worker, the mean; None if not all say how long steps take
    )
    times: tuple[WorkerTime, ...] = ()  # of some of the workers; empty if not all say how long steps take
    kv_used: float = 0.0  # sum of the workers' shares of KV blocks that requests own: 1.0 is one full worker

    @property
    def num_workers(self) -> int:
        return self.num_ready + self.num_silent

    @property
    def kv_usage(self) -> float:
        return self.kv_used / self.num_ready if self.num_ready else 0.0

    def per_pod(self, value: float) -> float:
        return value / self.num_ready if self.num_ready else float(value)


@dataclass(slots=True, frozen=True, kw_only=True)
class MovableWorker:
    """A worker of both roles that is ready, and may take work of either."""

    address: str
    role: WorkerRole  # that it takes work of
    epoch: str = ""
    num_shifts: int = 0  # since it started
    is_pinned: bool = False
    num_requests: int = 0  # running and waiting


@dataclass(slots=True, frozen=True, kw_only=True)
class FleetSignals:
    prefill: RoleSignals = RoleSignals()
    decode: RoleSignals = RoleSignals()
    both: RoleSignals = RoleSignals()  # of workers of both roles, whatever they take: only how many there are
    arrival_tokens_per_s: float | None = None  # prompt tokens at the routers; None if no router is asked
    arrived_tokens: float | None = None  # the same as a total since some moment; None likewise
    arrived_requests: float | None = None  # as a total since some moment; None likewise
    answered_tokens: float | None = None  # tokens of answers as a total; None likewise
    num_held_requests: int = 0  # at routers, waiting for a first worker

    def of(self, role: WorkerRole) -> RoleSignals:
        return {WorkerRole.PREFILL: self.prefill, WorkerRole.DECODE: self.decode, WorkerRole.BOTH: self.both}[role]

    @property
    def is_busy(self) -> bool:
        """Somebody waits for an answer, anywhere."""
        return bool(
            self.num_held_requests
            or self.prefill.num_requests
            or self.prefill.queued_tokens
            or self.decode.num_requests
            or self.arrival_tokens_per_s
        )


@dataclass(slots=True, frozen=True)
class Need:
    """How many workers the load would keep at their target, unrounded; `unknown` more if silent workers are full.
    `exact`: one fewer would miss the target, so no tolerance about the present number applies. `plenty`: with so many
    the target would be kept with room to spare, so those beyond it need not wait for the scale-down delay; None: not
    known."""

    workers: float
    reason: str
    unknown: float = 0.0
    exact: bool = False
    plenty: float | None = None


@dataclass(slots=True, frozen=True, kw_only=True)
class ScaleDecision:
    role: WorkerRole
    desired: int
    previous: int  # what was desired before
    needed: float  # workers, unrounded, before anything held it back
    reasons: tuple[str, ...]  # what asks for how many, then what holds it back
