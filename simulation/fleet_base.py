"""What all simulated fleets have in common: requests that come and are let in, workers that come and go, the planner,
and what is paid for them. How a worker serves a request is the subclass's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, Protocol, TypeVar

from common.block_hash import root_hash
from common.config import EngineSettings
from common.errors import BatonError, OverloadedError
from common.retry_budget import RetryBudget, hedge_budget
from common.targets import LatencyTargets
from common.traffic.requests import TrafficRequest
from common.types import WorkerLoad, WorkerRole
from engine.simulated.data_sheet import SimulatedTime
from router.autoscaler.fleet_load import Totals
from router.autoscaler.signals import MovableWorker
from router.policy.base import Policy, RoutingDecision
from simulation.admission import AdmissionOptions, SimulatedAdmission, Visit
from simulation.clock import VirtualClock
from simulation.device import spec_of
from simulation.link import LinkSpeed, Network
from simulation.outcome import Outcome, RequestOutcome
from simulation.router import SimulatedRouter
from simulation.scaling import PLAN_S, Scaling, ScalingOptions
from simulation.step_times import HostTime


@dataclass(slots=True, frozen=True, kw_only=True)
class FleetOptions:
    num_workers: dict[WorkerRole, int]
    times: dict[WorkerRole, SimulatedTime]
    settings: EngineSettings  # of all workers; `num_blocks` None: what the device holds
    policy: Callable[[], Policy]
    link: LinkSpeed = field(default_factory=LinkSpeed)
    max_model_len: int = 131_072
    message_s: float = 0.0005  # a message's way from process to process
    host: HostTime = field(default_factory=HostTime)
    leaps: bool = False  # of workers with engines
    is_counted: bool = False  # workers have no engines
    tells_times: bool = True  # workers say how long their steps take, so that the router counts in seconds
    lends: bool = True  # decode workers lend what they have of a prompt
    scaling: ScalingOptions | None = None  # None: the fleet stays as it is
    targets: LatencyTargets | None = None  # of all requests
    admission: AdmissionOptions = field(default_factory=AdmissionOptions)  # what the router lets in, and when


PROGRESS_EVENTS = 4096  # from one call of `progress` to the next


class Worker(Protocol):
    address: str
    role: WorkerRole

    @property
    def busy_s(self) -> float:
        """Of the device."""

    @property
    def num_steps(self) -> int: ...

    @property
    def load(self) -> WorkerLoad: ...

    def check_integrity(self) -> list[str]:
        """What is wrong with its blocks or queues; empty if nothing is."""


class OnItsWay(Protocol):
    """A request that was sent to a worker and has not ended."""

    outcome: RequestOutcome
    visit: Visit | None  # None: the router lets everybody in
    needed: list[str]  # addresses of workers that may not end before


WorkerT = TypeVar("WorkerT", bound=Worker)
RequestT = TypeVar("RequestT", bound=OnItsWay)


@dataclass(slots=True, eq=False)
class Member(Generic[WorkerT]):
    worker: WorkerT
    since: float  # paid from here
    takes: WorkerRole  # work of this role
    num_running: int = 0  # requests on their way that need it
    is_draining: bool = False
    hedges: RetryBudget = field(default_factory=hedge_budget)  # of the prompts that it has prefill workers compute


class FleetBase(ABC, Generic[WorkerT, RequestT]):
    """Serves one traffic, once."""

    def __init__(self, options: FleetOptions, router: SimulatedRouter) -> None:
        self._options = options
        self._clock = VirtualClock()
        self._network = Network(self._clock, options.link)
        limits = options.admission
        self._admission = None if limits.is_unlimited else SimulatedAdmission(limits, self._clock)
        self._retries = RetryBudget()
        self._router = router
        self._root = root_hash(spec_of(options.settings.block_size).fingerprint())
        self._members: dict[str, Member[WorkerT]] = {}
        self._numbers = dict.fromkeys(WorkerRole, 0)
        self._num_starting = dict.fromkeys(WorkerRole, 0)
        self._asked: list[tuple[WorkerRole, float]] = []  # when the planner asked for each worker
        self._on_their_way: dict[str, RequestT] = {}
        self._paid_s = dict.fromkeys(WorkerRole, 0.0)
        self._busy_s = dict.fromkeys(WorkerRole, 0.0)
        self._num_steps = 0
        self._arrived = self._answered = 0  # tokens of prompts and of answers
        self._outcomes: list[RequestOutcome] = []
        self._last_end = 0.0
        self._is_arriving = True
        times = {role: one.time for role, one in options.times.items()}
        self._scaling = None if options.scaling is None else Scaling(options.scaling, times)

    @abstractmethod
    def _new_worker(
        self, address: str, role: WorkerRole, times: SimulatedTime, num_blocks: int, max_model_len: int
    ) -> WorkerT:
        """A worker that serves from now on, and that the router knows."""

    @abstractmethod
    def _block_names(self, request: TrafficRequest) -> Sequence[bytes]:
        """Names of the full blocks of its prompt without the last token, which is always computed."""

    @abstractmethod
    def _dispatch(
        self,
        key: str,
        request: TrafficRequest,
        outcome: RequestOutcome,
        visit: Visit | None,
        decision: RoutingDecision,
        targets: LatencyTargets | None,
        block_names: Sequence[bytes],
    ) -> None:
        """The request goes where `decision` says, and at its end to `_leave`."""

    def _started_to_serve(self, worker: WorkerT) -> None:
        """The worker is a member from now on."""

    def _add_first_workers(self) -> None:
        for role, number in self._options.num_workers.items():
            for _ in range(number):
                self._add_worker(role)

    def run(self, requests: Iterable[TrafficRequest], progress: Callable[[int], None] = lambda _: None) -> Outcome:
        """Serves `requests`, which come in the order of time, to their ends. `progress` gets how many have ended."""
        arriving = iter(requests)
        self._arrive_next(arriving)
        if self._scaling is not None:
            self._clock.at(0.0, self._plan)
        while self._clock.steps(PROGRESS_EVENTS):
            progress(len(self._outcomes) - len(self._on_their_way))
        for one in self._on_their_way.values():
            one.outcome.failure = "its answer never ended"
        progress(len(self._outcomes))
        end = max(self._last_end, 1e-9)
        for member in self._members.values():
            self._paid_s[member.worker.role] += max(end - member.since, 0.0)
            self._count_work(member.worker)
        startup_s = 0.0 if self._options.scaling is None else self._options.scaling.startup_s
        for role, asked_at in self._asked:  # the run may end while a worker starts
            self._paid_s[role] += min(startup_s, max(end - asked_at, 0.0))
        return Outcome(
            requests=self._outcomes,
            seconds=end,
            paid_s={role: seconds for role, seconds in self._paid_s.items() if seconds},
            busy_s={role: seconds for role, seconds in self._busy_s.items() if seconds},
            num_steps=self._num_steps,
            num_transfers=self._network.num_transfers,
            num_bytes=self._network.num_bytes,
            transfer_s=self._network.transfer_s,
            scaled=self._scaling.history if self._scaling is not None else (),
            shifts=self._scaling.shifts if self._scaling is not None else (),
        )

    def check_integrity(self) -> list[str]:
        """What is wrong with blocks or queues of any worker; empty if nothing is."""
        members = self._members.values()
        return [problem for member in members for problem in member.worker.check_integrity()]

    # ---------------------------------------------------------------------------------------------- requests

    def _arrive_next(self, arriving: Iterator[TrafficRequest]) -> None:
        if (request := next(arriving, None)) is not None:
            self._clock.at(request.at, partial(self._arrive, request, arriving))
        else:
            self._is_arriving = False

    def _arrive(self, request: TrafficRequest, arriving: Iterator[TrafficRequest]) -> None:
        self._arrive_next(arriving)
        num_prompt = request.num_prompt_tokens
        outcome = RequestOutcome(
            at=self._clock.now,
            num_prompt_tokens=num_prompt,
            num_output_tokens=request.num_output_tokens,
            tenant=request.tenant,
        )
        key = str(len(self._outcomes))
        self._outcomes.append(outcome)
        if self._admission is None:
            self._arrived += num_prompt
            self._route(key, request, outcome, None)
            return

        def begin() -> None:
            outcome.queue_s = self._clock.now - outcome.at
            self._route(key, request, outcome, visit)

        def refuse(error: BatonError) -> None:
            outcome.failure = error.message

        try:
            visit = self._admission.admit(request.tenant, num_prompt, request.num_output_tokens, begin, refuse)
        except BatonError as error:
            refuse(error)
        else:
            self._arrived += num_prompt

    def _route(self, key: str, request: TrafficRequest, outcome: RequestOutcome, visit: Visit | None) -> None:
        """The request's turn has come: it goes to a decode worker."""
        options, block_names = self._options, self._block_names(request)
        targets = options.targets
        if self._admission is not None:
            targets = self._admission.targets(request.tenant, targets)
        self._retries.request()
        try:
            decision = self._pick(request, outcome, block_names, targets)
            if decision.late is not None:
                outcome.was_late = True
                if options.settings.slo_late == "refuse":
                    raise OverloadedError("no worker can give its first token in time")
        except BatonError as error:
            outcome.failure = error.message
            self._leave(visit)
            return
        self._dispatch(key, request, outcome, visit, decision, targets, block_names)

    def _pick(
        self,
        request: TrafficRequest,
        outcome: RequestOutcome,
        block_names: Sequence[bytes],
        targets: LatencyTargets | None,
        tried: Iterable[tuple[str, str]] = (),
    ) -> RoutingDecision:
        return self._router.pick(
            self._clock.now,
            num_prompt_tokens=outcome.num_prompt_tokens,
            num_tokens=outcome.num_prompt_tokens + request.num_output_tokens,
            block_names=block_names,
            session=request.session,
            targets=targets,
            age_s=self._clock.now - outcome.at,
            refused=tried,
        )

    def _need(self, one: RequestT, address: str) -> WorkerT | None:
        """The worker at this address, which does not end before the request; None if it has ended."""
        if (member := self._members.get(address)) is None:
            return None
        if address not in one.needed:
            one.needed.append(address)
            member.num_running += 1
        return member.worker

    def _let_go(self, one: RequestT) -> None:
        """Its workers need not wait for it any more."""
        for address in one.needed:
            member = self._members[address]
            member.num_running -= 1
            self._remove_if_done(member)
        one.needed.clear()

    def _leave(self, visit: Visit | None) -> None:
        if self._admission is not None and visit is not None:
            self._admission.end(visit)

    # ----------------------------------------------------------------------------------------------- workers

    @property
    def _moves_roles(self) -> bool:
        return self._options.scaling is not None and self._options.scaling.roles is not None

    def _add_worker(self, takes: WorkerRole) -> None:
        """A worker that serves from now on."""
        role = WorkerRole.BOTH if self._moves_roles else takes
        options, settings, times = self._options, self._options.settings, self._options.times[role]
        self._numbers[role] += 1
        address = f"{role.value}-{self._numbers[role]}"
        num_blocks = settings.num_blocks or max(times.kv_tokens // settings.block_size, 1)
        max_model_len = min(options.max_model_len, num_blocks * settings.block_size)
        time = times.time if options.tells_times else None
        self._router.add(address, role, time, max_model_len, takes if self._moves_roles else None)
        worker = self._new_worker(address, role, times, num_blocks, max_model_len)
        self._members[address] = Member(worker, self._clock.now, takes)
        self._started_to_serve(worker)

    def _plan(self) -> None:
        """Once a second, for as long as there is somebody to serve."""
        scaling, options = self._scaling, self._options.scaling
        is_over = not (self._is_arriving or self._on_their_way or (self._admission and self._admission.num_waiting))
        if scaling is None or options is None or is_over:
            return
        now = self._clock.now
        self._clock.at(now + PLAN_S, self._plan)
        serving: dict[WorkerRole, list[Member[WorkerT]]] = {role: [] for role in WorkerRole}
        taking: dict[WorkerRole, list[WorkerLoad]] = {role: [] for role in WorkerRole}
        for member in self._members.values():
            if not member.is_draining:
                serving[member.worker.role].append(member)
                for role in _ALL if member.takes is WorkerRole.BOTH else (member.takes,):
                    taking[role].append(member.worker.load)
        totals = Totals(len(self._outcomes), self._arrived, self._answered)
        wanted, shift = scaling.decide(now, taking, totals, self._movable(serving[WorkerRole.BOTH]))
        if shift is not None:
            self._members[shift.worker.address].takes = shift.role
            self._router.set_role(shift.worker.address, shift.role)
        if options.adds:
            self._scale(options, serving, wanted)

    def _movable(self, members: Iterable[Member[WorkerT]]) -> list[MovableWorker]:
        if not self._moves_roles:
            return []
        return [
            MovableWorker(address=member.worker.address, role=member.takes, num_requests=member.num_running)
            for member in members
        ]

    def _scale(
        self,
        options: ScalingOptions,
        serving: Mapping[WorkerRole, Sequence[Member[WorkerT]]],
        wanted: Mapping[WorkerRole, int],
    ) -> None:
        """Asks for workers, and drains the emptiest of those that are too many. Where roles move, all workers have
        both, and one that takes requests is left."""
        now = self._clock.now
        for role, number in wanted.items():
            if self._moves_roles is not (role is WorkerRole.BOTH):
                continue
            num_more = number - len(serving[role]) - self._num_starting[role]
            for _ in range(num_more):
                self._num_starting[role] += 1
                self._asked.append((role, now))
                self._clock.at(now + options.startup_s, partial(self._started, role))
            emptiest_first = sorted(serving[role], key=lambda member: member.num_running)
            for member in emptiest_first[: max(-num_more, 0)]:
                if self._moves_roles and member.takes is not WorkerRole.PREFILL:
                    takers = [one for one in serving[role] if one.takes is not WorkerRole.PREFILL]
                    if sum(not one.is_draining for one in takers) <= 1:
                        continue
                member.is_draining = True
                self._router.drain(member.worker.address)
                self._remove_if_done(member)

    def _started(self, role: WorkerRole) -> None:
        self._num_starting[role] -= 1
        self._add_worker(role)

    def _remove_if_done(self, member: Member[WorkerT]) -> None:
        if not member.is_draining or member.num_running:
            return
        worker = member.worker
        if self._members.pop(worker.address, None) is None:
            return
        self._paid_s[worker.role] += self._clock.now - member.since
        self._count_work(worker)
        self._router.remove(worker.address)

    def _count_work(self, worker: WorkerT) -> None:
        self._busy_s[worker.role] += worker.busy_s
        self._num_steps += worker.num_steps


_ALL = tuple(WorkerRole)
