"""A fleet of workers that are plain numbers, and requests on their way through it.

The way is that of `simulation.fleet`, and all messages take the same time; each is one event:

    router ──> decode worker ──ask──> prefill worker ──blocks, with the last ones the first token──> decode worker
                     ──loan, if the prefill worker lacks what the decode worker has──>
                     ──release──>
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from common.targets import LatencyTargets
from common.traffic.requests import TrafficRequest
from common.types import WorkerRole
from engine.simulated.data_sheet import SimulatedTime
from router.policy.base import RoutingDecision
from simulation.admission import Visit
from simulation.counted.block_names import names_of
from simulation.counted.job import Job, Mode
from simulation.counted.router import CountedRouter
from simulation.counted.worker import CountedWorker
from simulation.fleet_base import FleetBase, FleetOptions
from simulation.outcome import RequestOutcome
from simulation.step_times import StepTimes


@dataclass(slots=True, eq=False)
class _OnItsWay:
    outcome: RequestOutcome
    decision: RoutingDecision
    decode: CountedWorker
    job: Job  # on the decode worker
    visit: Visit | None  # None: the router lets everybody in
    needed: list[str] = field(default_factory=list)  # addresses of workers that may not end before
    prefill: CountedWorker | None = None  # None: none was asked
    part: Job | None = None  # on the prefill worker
    done_at: float | None = None  # when the prefill worker had computed all that it was asked for


class CountedFleet(FleetBase[CountedWorker, _OnItsWay]):
    """Of workers whose tokens and blocks are counted."""

    def __init__(self, options: FleetOptions) -> None:
        self._counted = CountedRouter(options.policy(), options.settings.block_size)
        super().__init__(options, self._counted)
        self._times = {role: StepTimes(one.time, options.host) for role, one in options.times.items()}
        self._add_first_workers()

    def _new_worker(
        self,
        address: str,
        role: WorkerRole,
        times: SimulatedTime,  # noqa: ARG002 - those of its role
        num_blocks: int,
        max_model_len: int,  # noqa: ARG002 - the router sends no longer requests
    ) -> CountedWorker:
        return CountedWorker(
            address,
            role,
            self._options.settings,
            self._times[role],
            self._clock,
            self._counted,
            self,
            num_blocks=num_blocks,
        )

    def _started_to_serve(self, worker: CountedWorker) -> None:
        self._counted.changing(worker, self._clock.now)

    # ---------------------------------------------------------------------------------------------- requests

    def _block_names(self, request: TrafficRequest) -> Sequence[bytes]:
        self._names, self._chain = names_of(request.runs, self._options.settings.block_size)
        is_whole = len(self._names) * self._options.settings.block_size == request.num_prompt_tokens
        self._counted.take_reports(self._clock.now)
        return self._names[:-1] if is_whole else self._names[:]

    def _dispatch(
        self,
        key: str,
        request: TrafficRequest,
        outcome: RequestOutcome,
        visit: Visit | None,
        decision: RoutingDecision,
        targets: LatencyTargets | None,  # noqa: ARG002 - workers do not look at them
        block_names: Sequence[bytes],
    ) -> None:
        num_prompt = outcome.num_prompt_tokens
        job = Job(
            key,
            Mode.REMOTE if decision.prefill else Mode.LOCAL,
            num_prompt,
            request.num_output_tokens,
            self._names,
            self._chain,
            min_remote=decision.min_remote_tokens,
            num_asked=decision.split_at or num_prompt,
        )
        decode = self._members[decision.decode.address].worker
        one = self._on_their_way[key] = _OnItsWay(outcome, decision, decode, job, visit)
        self._router.send(key, self._clock.now, decision, block_names, num_prompt)
        outcome.decode, outcome.num_tail_tokens = decode.address, decision.num_tail_tokens
        self._need(one, decode.address)
        if decision.prefill:
            self._need(one, decision.prefill[0].address)
        self._mail(partial(decode.add, job))

    def _mail(self, deliver: partial[None]) -> None:
        self._clock.at(self._clock.now + self._options.message_s, deliver)

    # ------------------------------------------------------------------------------------ what workers say

    def report_blocks(self, worker: CountedWorker, stored: bytes, removed: bytes) -> None:
        if worker.address in self._members:
            self._router.report_blocks(worker.address, stored, removed)

    def ask_prefill(self, job: Job, first_block: int, stop_block: int) -> None:
        one = self._on_their_way[job.key]
        worker = self._members[one.decision.prefill[0].address].worker
        size = self._options.settings.block_size
        one.prefill = worker
        one.part = Job(
            job.key,
            Mode.PREFILL,
            stop_block * size or job.num_prompt,
            job.num_output,
            job.names,
            job.chain,
            first_block=first_block,
            num_published=first_block,
            num_lendable=first_block if self._options.lends else 0,
            is_part=stop_block > 0,
        )
        one.outcome.prefill = worker.address
        self._mail(partial(worker.add, one.part))

    def ask_loan(self, job: Job, first_block: int, stop_block: int) -> None:
        self._mail(partial(self._lend, self._on_their_way[job.key], job, first_block, stop_block))

    def _lend(self, one: _OnItsWay, job: Job, first_block: int, stop_block: int) -> None:
        """The decode worker says where those of the blocks are that it has by now."""
        one.decode.hear()
        num_here = min(one.job.num_computed // self._options.settings.block_size, stop_block)
        self._mail(partial(self._borrow, one, job, first_block, num_here))

    def _borrow(self, one: _OnItsWay, job: Job, first_block: int, stop_block: int) -> None:
        """The prefill worker hears of blocks that it may read."""
        worker = one.prefill
        assert worker is not None  # noqa: S101 - who asks for a loan was asked for a prefill
        if stop_block <= first_block:
            worker.settle(job, first_block)
            return
        worker.hear()
        arrived = self._move(one, one.decode, worker, stop_block - first_block)
        self._clock.at(arrived, partial(worker.settle, job, stop_block))

    def _move(self, one: _OnItsWay, source: CountedWorker, target: CountedWorker, num_blocks: int) -> float:
        """Moves blocks. Returns when they have arrived."""
        kv_token_bytes = self._options.times[target.role].kv_token_bytes
        num_bytes = num_blocks * kv_token_bytes * self._options.settings.block_size
        one.outcome.num_bytes_moved += num_bytes
        return self._network.send(source.address, target.address, num_bytes)

    def published(self, job: Job, num_blocks: int, *, is_last: bool) -> None:
        one, now = self._on_their_way[job.key], self._clock.now
        if is_last:
            outcome = one.outcome
            one.done_at = now
            outcome.num_cached_tokens = min(job.num_cached, outcome.num_prompt_tokens)
            if not job.is_part:
                # The decode worker's front passes it on at once.
                self._had_first_token(one, now + 2 * self._options.message_s)
        self._mail(partial(self._hear, one, job, num_blocks, is_last))

    def _hear(self, one: _OnItsWay, part: Job, num_blocks: int, is_last: bool) -> None:
        """The decode worker hears of blocks, and with the last ones of the first token."""
        job, decode, prefill = one.job, one.decode, one.prefill
        assert prefill is not None  # noqa: S101 - it says so
        if is_last and not part.is_part:
            job.num_drawn = 1
            if job.num_output == 1:
                decode.end_parked(job)
                return
        decode.hear()
        arrived = self._move(one, prefill, decode, num_blocks) if num_blocks else self._clock.now
        if is_last:
            self._clock.at(arrived, partial(decode.settle, job, part.num_published))

    def needs_no_more(self, job: Job) -> None:
        one, now = self._on_their_way[job.key], self._clock.now
        if one.prefill is None or one.part is None:
            return
        if one.done_at is not None:
            handoff_s = max(now - one.done_at - self._options.message_s, 0.0)
            self._router.first_tokens.handed_over(one.decision.num_missing_tokens, handoff_s, now)
        self._mail(partial(one.prefill.release, one.part))

    def first_token(self, job: Job) -> None:
        self._had_first_token(self._on_their_way[job.key], self._clock.now + self._options.message_s)

    def _had_first_token(self, one: _OnItsWay, at: float) -> None:
        outcome = one.outcome
        outcome.ttft_s = at - outcome.at
        if one.decision.first_token_s is not None:
            self._router.first_tokens.came(one.decision.first_token_s, outcome.ttft_s - outcome.queue_s)

    def ended(self, job: Job) -> None:
        one = self._on_their_way.pop(job.key)
        outcome = one.outcome
        if one.prefill is None:
            outcome.num_cached_tokens = job.num_cached
        outcome.num_preemptions = job.num_preemptions
        self._answered += job.num_output
        if self._admission is not None:
            self._admission.answered(outcome.tenant, job.num_output)
        self._router.ended(job.key, one.decision)
        end = self._clock.now + self._options.message_s
        outcome.e2e_s = end - outcome.at
        self._last_end = max(self._last_end, end)
        self._let_go(one)
        self._leave(one.visit)
