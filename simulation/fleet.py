"""A fleet, and requests on their way through it.

A request's way is that of `decode_service` and `prefill_service`, whose messages take `message_s` each:

    router ──> decode worker ──RemotePrefillNeeded──> prefill worker
                    <──first token, blocks as they are computed──
                    ──blocks that the prefill worker lacks, if it asks──>
               PrefillReceived ──release──>
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial

from common.block_hash import block_hashes, root_hash
from common.config import EngineSettings
from common.errors import BatonError, OverloadedError
from common.retry_budget import RetryBudget, hedge_budget
from common.sampling import SamplingParams
from common.targets import LatencyTargets
from common.traffic.requests import TrafficRequest
from common.types import WorkerLoad, WorkerRole
from engine import messages as m
from engine.scheduling.schedule import LateRequest
from engine.simulated.data_sheet import SimulatedTime
from router.autoscaler.fleet_load import Totals
from router.autoscaler.signals import MovableWorker
from router.policy.base import Policy, RoutingDecision
from router.running.prefill_times import PrefillTimes
from router.running.retries import DispatchLimits
from simulation.admission import AdmissionOptions, SimulatedAdmission, Visit
from simulation.clock import VirtualClock
from simulation.device import VirtualDevice, spec_of
from simulation.link import Link, LinkSpeed, Network
from simulation.outcome import Outcome, RequestOutcome
from simulation.prefill_leg import Mail, PrefillLeg
from simulation.router import SimulatedRouter
from simulation.scaling import PLAN_S, Scaling, ScalingOptions
from simulation.worker import HostTime, SimulatedWorker


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
    leaps: bool = False
    tells_times: bool = True  # workers say how long their steps take, so that the router counts in seconds
    lends: bool = True  # decode workers lend what they have of a prompt
    scaling: ScalingOptions | None = None  # None: the fleet stays as it is
    targets: LatencyTargets | None = None  # of all requests
    admission: AdmissionOptions = field(default_factory=AdmissionOptions)  # what the router lets in, and when


@dataclass(slots=True, eq=False)
class _OnItsWay:
    request: TrafficRequest
    outcome: RequestOutcome
    decision: RoutingDecision
    decode: SimulatedWorker
    targets: LatencyTargets | None
    visit: Visit | None  # None: the router lets everybody in
    block_names: Sequence[bytes] = ()
    needed: list[str] = field(default_factory=list)  # addresses of workers that may not end before
    tried: set[tuple[str, str]] = field(default_factory=set)  # decode workers that refused it: `Endpoint.incarnation`
    leg: PrefillLeg | None = None  # None: there is no prefill worker for it
    is_released: bool = False  # by the decode worker
    num_told_tokens: int = 0  # of the answer, that the router has counted
    has_first_token: bool = False  # as the router has noted


@dataclass(slots=True, eq=False)
class _Member:
    worker: SimulatedWorker
    since: float  # paid from here
    takes: WorkerRole  # work of this role
    num_running: int = 0  # requests on their way that need it
    is_draining: bool = False
    hedges: RetryBudget = field(default_factory=hedge_budget)  # of the prompts that it has prefill workers compute


class Fleet:
    """Serves one traffic, once."""

    def __init__(self, options: FleetOptions) -> None:
        self._options = options
        self._clock = VirtualClock()
        self._network = Network(self._clock, options.link)
        self._mail = Mail(self._clock, options.message_s)
        limits = options.admission
        self._admission = None if limits.is_unlimited else SimulatedAdmission(limits, self._clock)
        self._retries = RetryBudget()
        self._prefill_times = PrefillTimes()
        self._router = SimulatedRouter(options.policy(), options.settings.block_size)
        self._root = root_hash(spec_of(options.settings.block_size).fingerprint())
        self._members: dict[str, _Member] = {}
        self._numbers = dict.fromkeys(WorkerRole, 0)
        self._num_starting = dict.fromkeys(WorkerRole, 0)
        self._asked: list[tuple[WorkerRole, float]] = []  # when the planner asked for each worker
        self._on_their_way: dict[str, _OnItsWay] = {}
        self._paid_s = dict.fromkeys(WorkerRole, 0.0)
        self._busy_s = dict.fromkeys(WorkerRole, 0.0)
        self._num_steps = 0
        self._arrived = self._answered = 0  # tokens of prompts and of answers
        self._outcomes: list[RequestOutcome] = []
        self._last_end = 0.0
        self._is_arriving = True
        times = {role: one.time for role, one in options.times.items()}
        self._scaling = None if options.scaling is None else Scaling(options.scaling, times)
        for role, number in options.num_workers.items():
            for _ in range(number):
                self._add_worker(role)

    def run(self, requests: Iterable[TrafficRequest], progress: Callable[[int], None] = lambda _: None) -> Outcome:
        """Serves `requests`, which come in the order of time, to their ends. `progress` gets how many have ended."""
        arriving = iter(requests)
        self._arrive_next(arriving)
        if self._scaling is not None:
            self._clock.at(0.0, self._plan)
        num_events = 0
        while self._clock.step():
            num_events += 1
            if not num_events % 4096:
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
        return [problem for member in members for problem in member.worker.core.scheduler.check_integrity()]

    # ---------------------------------------------------------------------------------------------- requests

    def _arrive_next(self, arriving: Iterator[TrafficRequest]) -> None:
        if (request := next(arriving, None)) is not None:
            self._clock.at(request.at, lambda: self._arrive(request, arriving))
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
        options, token_ids = self._options, prompt_of(request)
        block_names = block_hashes(self._root, token_ids[:-1], options.settings.block_size)
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
        decode = self._members[decision.decode.address].worker
        one = _OnItsWay(request, outcome, decision, decode, targets, visit, block_names)
        self._on_their_way[key] = one
        self._send(one, key)

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
            num_prompt_tokens=request.num_prompt_tokens,
            num_tokens=request.num_prompt_tokens + request.num_output_tokens,
            block_names=block_names,
            session=request.session,
            targets=targets,
            age_s=self._clock.now - outcome.at,
            refused=tried,
        )

    def _send(self, one: _OnItsWay, key: str) -> None:
        """The request goes where its decision says."""
        decision, outcome = one.decision, one.outcome
        self._router.send(key, self._clock.now, decision, one.block_names)
        outcome.decode, outcome.num_tail_tokens = one.decode.address, decision.num_tail_tokens
        self._need(one, one.decode.address)
        if decision.prefill:
            self._need(one, decision.prefill[0].address)
            one.leg = self._leg(one, key)
        command = m.AddRequest(
            request_id=key,
            prompt_token_ids=prompt_of(one.request),
            sampling_params=_greedy(one.request.num_output_tokens),
            mode=m.RequestMode.REMOTE if decision.prefill else m.RequestMode.LOCAL,
            min_remote_tokens=decision.min_remote_tokens,
            split_at=decision.split_at,
            targets=one.targets,
            asked_time=outcome.at,
        )
        self._mail.send(one.decode, command)

    def _retry(self, one: _OnItsWay, key: str) -> bool:
        """Sends a request that its decode worker refused to another one, as `router.running.dispatch` does. False if
        there is none, or there were too many such requests."""
        one.tried.add(one.decision.decode.incarnation)
        if len(one.tried) > DispatchLimits().num_retries or not self._retries.spend(self._clock.now):
            return False
        try:
            decision = self._pick(one.request, one.outcome, one.block_names, one.targets, one.tried)
        except BatonError:
            return False
        self._release(one)
        self._router.ended(key, one.decision)
        self._let_go(one)
        one.decision, one.decode, one.leg, one.is_released = (
            decision,
            self._members[decision.decode.address].worker,
            None,
            False,
        )
        one.outcome.num_retries += 1
        self._send(one, key)
        return True

    def _leg(self, one: _OnItsWay, key: str) -> PrefillLeg:
        decision, now = one.decision, self._clock.now
        has_budget = self._retries.allows(now)  # else there is no other worker than the first
        may_hedge = decision.may_hedge and has_budget
        late_s = self._prefill_times.late_s(decision.prefill_cost, decision.prefill_s) if may_hedge else None
        return PrefillLeg(
            key,
            one.outcome,
            one.decode,
            [helper.address for helper in decision.prefill[: None if has_budget else 1]],
            partial(self._need, one),
            self._mail,
            hedge_after_s=late_s,
            hedges=self._members[one.decode.address].hedges,
            lends=self._options.lends,
        )

    def _need(self, one: _OnItsWay, address: str) -> SimulatedWorker | None:
        """The worker at this address, which does not end before the request; None if it has ended."""
        if (member := self._members.get(address)) is None:
            return None
        if address not in one.needed:
            one.needed.append(address)
            member.num_running += 1
        return member.worker

    def _take_in(self, worker: SimulatedWorker, event: m.Event) -> None:
        """An engine says something."""
        if not isinstance(event, _OF_REQUESTS) or (one := self._on_their_way.get(event.request_id)) is None:
            return
        if worker is one.decode:
            self._take_in_decode(one, event)
        elif one.leg is not None:
            one.leg.take_in(worker, event)
        outcome, predicted_s = one.outcome, one.decision.first_token_s
        if outcome.ttft_s is not None and not one.has_first_token:
            one.has_first_token = True
            if predicted_s is not None:
                self._router.first_tokens.came(predicted_s, outcome.ttft_s - outcome.queue_s)

    def _take_in_decode(self, one: _OnItsWay, event: m.Event) -> None:
        outcome = one.outcome
        match event:
            case m.RemotePrefillNeeded(key, first_block, stop_block):
                if one.leg is not None:
                    num_asked = stop_block * self._options.settings.block_size or one.request.num_prompt_tokens
                    command = m.AddRequest(
                        request_id=key,
                        prompt_token_ids=prompt_of(one.request)[:num_asked],
                        sampling_params=_greedy(one.request.num_output_tokens),
                        mode=m.RequestMode.PREFILL,
                        is_part=stop_block > 0,
                        first_block=first_block,
                        targets=one.targets,
                        asked_time=outcome.at,
                    )
                    one.leg.start(command)
            case m.BlocksFetched():
                outcome.num_bytes_moved += event.num_bytes
            case m.BlocksPublished():
                if one.leg is not None:
                    one.leg.lend(event)
            case m.PrefillReceived():
                if one.leg is not None and one.leg.done_at is not None:
                    handoff_s = max(self._clock.now - one.leg.done_at - self._options.message_s, 0.0)
                    self._router.first_tokens.handed_over(one.decision.num_missing_tokens, handoff_s, self._clock.now)
                self._release(one)
            case m.TokensGenerated():
                # Of a leap, and of the first token that comes from a prefill worker, the router hears at the end.
                is_end = event.finish_reason is not None
                num_new = outcome.num_output_tokens - one.num_told_tokens if is_end else len(event.tokens)
                one.num_told_tokens += num_new
                self._answered += num_new
                if event.tokens and outcome.ttft_s is None:
                    outcome.ttft_s = self._clock.now + self._options.message_s - outcome.at
                outcome.num_preemptions = event.num_preemptions
                if one.leg is None or not one.leg.is_started:
                    outcome.num_cached_tokens = event.num_cached_tokens
                if self._admission is not None:
                    self._admission.answered(outcome.tenant, num_new)
                if event.finish_reason is not None:
                    self._end(one, event.request_id)
            case m.RequestFailed(key, code, reason):
                if code == OverloadedError.grpc_code and outcome.ttft_s is None and self._retry(one, key):
                    return
                outcome.failure = f"{code}: {reason}"
                self._end(one, key)

    def _release(self, one: _OnItsWay) -> None:
        """The decode worker needs nothing more of prefill workers."""
        if one.leg is not None and one.leg.is_started and not one.is_released:
            one.is_released = True
            one.leg.release()

    def _end(self, one: _OnItsWay, key: str) -> None:
        outcome, decision, leg = one.outcome, one.decision, one.leg
        self._release(one)
        del self._on_their_way[key]
        self._router.ended(key, decision)
        outcome.e2e_s = self._clock.now + self._options.message_s - outcome.at
        self._last_end = max(self._last_end, outcome.at + outcome.e2e_s)
        if leg is not None and leg.elapsed_s is not None and not outcome.failure:
            if outcome.prefill == decision.prefill[0].address and decision.num_missing_tokens:
                self._prefill_times.came(decision.prefill_cost, leg.elapsed_s, decision.prefill_s)
            for _ in range(outcome.num_hedges + leg.num_retries):
                self._retries.spend(self._clock.now)
        self._let_go(one)
        self._leave(one.visit)

    def _let_go(self, one: _OnItsWay) -> None:
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
        worker = SimulatedWorker(
            address,
            role,
            settings,
            VirtualDevice(
                times.time, num_blocks=num_blocks, block_size=settings.block_size, max_model_len=max_model_len
            ),
            Link(address, self._network, times.kv_token_bytes * settings.block_size),
            self._clock,
            leaps=options.leaps,
            host=options.host,
            emit=self._take_in,
            report_load=self._report_load,
            report_blocks=self._report_blocks,
            report_late=self._report_late,
        )
        self._members[address] = _Member(worker, self._clock.now, takes)
        worker.report()

    def _plan(self) -> None:
        """Once a second, for as long as there is somebody to serve."""
        scaling, options = self._scaling, self._options.scaling
        is_over = not (self._is_arriving or self._on_their_way or (self._admission and self._admission.num_waiting))
        if scaling is None or options is None or is_over:
            return
        now = self._clock.now
        self._clock.at(now + PLAN_S, self._plan)
        serving: dict[WorkerRole, list[_Member]] = {role: [] for role in WorkerRole}
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

    def _movable(self, members: Iterable[_Member]) -> list[MovableWorker]:
        if not self._moves_roles:
            return []
        return [
            MovableWorker(address=member.worker.address, role=member.takes, num_requests=member.num_running)
            for member in members
        ]

    def _scale(
        self,
        options: ScalingOptions,
        serving: Mapping[WorkerRole, Sequence[_Member]],
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

    def _remove_if_done(self, member: _Member) -> None:
        if not member.is_draining or member.num_running:
            return
        worker = member.worker
        if self._members.pop(worker.address, None) is None:
            return
        self._paid_s[worker.role] += self._clock.now - member.since
        self._count_work(worker)
        self._router.remove(worker.address)

    def _count_work(self, worker: SimulatedWorker) -> None:
        self._busy_s[worker.role] += worker.busy_s
        self._num_steps += worker.num_steps

    def _report_load(self, worker: SimulatedWorker, load: WorkerLoad, counted: Sequence[int]) -> None:
        if worker.address in self._members:
            self._router.report_load(worker.address, load, self._clock.now, counted)

    def _report_late(self, late: LateRequest) -> None:
        """A worker holds the targets of a request for missed, and refuses it or serves it after all."""
        if one := self._on_their_way.get(late.request.request_id):
            one.outcome.was_late, one.outcome.late_cause = True, late.cause

    def _report_blocks(self, worker: SimulatedWorker, stored: bytes, removed: bytes) -> None:
        if worker.address in self._members:
            self._router.report_blocks(worker.address, stored, removed)


_ALL = tuple(WorkerRole)
_OF_REQUESTS = (
    m.RemotePrefillNeeded
    | m.LoanNeeded
    | m.BlocksPublished
    | m.BlocksFetched
    | m.PrefillReceived
    | m.TokensGenerated
    | m.RequestFailed
)


def prompt_of(request: TrafficRequest) -> list[int]:
    """Its tokens: of a run, the run's id again and again."""
    token_ids: list[int] = []
    for run_id, num_tokens in request.runs:
        token_ids += [run_id] * num_tokens
    return token_ids


@lru_cache(4096)
def _greedy(num_output_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_output_tokens, ignore_eos=True)
