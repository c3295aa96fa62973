"""A fleet of engines, and requests on their way through it.

A request's way is that of `decode_service` and `prefill_service`, whose messages take `message_s` each:

    router ──> decode worker ──RemotePrefillNeeded──> prefill worker
                    <──first token, blocks as they are computed──
                    ──blocks that the prefill worker lacks, if it asks──>
               PrefillReceived ──release──>
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial

from common.block_hash import block_hashes
from common.errors import BatonError, OverloadedError
from common.sampling import SamplingParams
from common.targets import LatencyTargets
from common.traffic.requests import TrafficRequest
from common.types import WorkerLoad, WorkerRole
from engine import messages as m
from engine.scheduling.schedule import LateRequest
from engine.simulated.data_sheet import SimulatedTime
from router.policy.base import RoutingDecision
from router.running.prefill_times import PrefillTimes
from router.running.retries import DispatchLimits
from simulation.admission import Visit
from simulation.device import VirtualDevice
from simulation.fleet_base import FleetBase, FleetOptions
from simulation.link import Link
from simulation.outcome import RequestOutcome
from simulation.prefill_leg import Mail, PrefillLeg
from simulation.router import SimulatedRouter
from simulation.worker import SimulatedWorker


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


class Fleet(FleetBase[SimulatedWorker, _OnItsWay]):
    """Of engines: each worker has its real scheduler, blocks and prefix cache."""

    def __init__(self, options: FleetOptions) -> None:
        super().__init__(options, SimulatedRouter(options.policy(), options.settings.block_size))
        self._mail = Mail(self._clock, options.message_s)
        self._prefill_times = PrefillTimes()
        self._add_first_workers()

    def _new_worker(
        self, address: str, role: WorkerRole, times: SimulatedTime, num_blocks: int, max_model_len: int
    ) -> SimulatedWorker:
        options, settings = self._options, self._options.settings
        return SimulatedWorker(
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

    def _started_to_serve(self, worker: SimulatedWorker) -> None:
        worker.report()

    def _block_names(self, request: TrafficRequest) -> Sequence[bytes]:
        return block_hashes(self._root, prompt_of(request)[:-1], self._options.settings.block_size)

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
        decode = self._members[decision.decode.address].worker
        one = _OnItsWay(request, outcome, decision, decode, targets, visit, block_names)
        self._on_their_way[key] = one
        self._send(one, key)

    def _send(self, one: _OnItsWay, key: str) -> None:
        """The request goes where its decision says."""
        decision, outcome = one.decision, one.outcome
        self._router.send(key, self._clock.now, decision, one.block_names, one.outcome.num_prompt_tokens)
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
