"""One engine: takes commands, runs steps, gives events. Single-threaded, and ignorant of how messages travel.

A step is `schedule -> compute -> update`. Between steps come commands and the results of KV transfers. The engine
never waits for a transfer: a request that needs remote KV is not scheduled until its blocks are here.

With `run_ahead` a step of decodes is begun before the last one has ended, so that the device need not wait for this
thread. Nothing else is decided while a step is under way: it waits for the end, as it does without `run_ahead`.

    begin n | prepare n+1, begin n+1 | end n, its tokens go out | prepare n+2, begin n+2 | end n+1 | ...
    device:   nnnnnnnnnnnnnnnnnnnnnnnnn n+1 n+1 n+1 n+1 n+1 n+1 n+1 n+1 n+1 n+2 n+2 ...
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial

import msgspec

from common.batch_time import BatchTime
from common.block_hash import root_hash
from common.config import EngineSettings
from common.errors import OverloadedError
from common.types import FinishReason, SampledToken, WorkerLoad, request_tag
from engine import messages as m
from engine.arrivals import Arrivals
from engine.blocks.block_manager import BlockManager
from engine.cache_hints import CacheHints
from engine.device import Device, StepGivenUp
from engine.forward_pass import ForwardPass, Pass
from engine.housekeeping import Housekeeping
from engine.integrity import IntegrityReport
from engine.pooling import embedding
from engine.remote_kv import Publish, RemoteKV
from engine.reports import (
    report_given_up,
    report_late,
    report_not_stored,
    report_order,
    report_preempted,
    report_settled,
    report_unreachable,
)
from engine.request import Request
from engine.sampling.grammars import Compiler, GrammarBounds, PendingGrammars
from engine.scheduling.schedule import LateRequest, NewToken, SchedulerConfig, SchedulerOutput
from engine.scheduling.scheduler import Scheduler
from engine.speculation.ngram import NgramDrafter
from engine.speculation.speculation import Drafter, Speculation
from kv_store.base import KVConnector
from kv_store.no_store import NoStore

log = logging.getLogger(__name__)

MAX_COUNTED = 1024  # newcomers that are named with the next load, the last ones
MAX_AHEAD = 16  # steps begun ahead in a row: housekeeping, which comes between steps, waits no longer


@dataclass(slots=True, frozen=True)
class BegunStep:
    """A step between `EngineCore.begin` and `EngineCore.end`."""

    output: SchedulerOutput
    written: Collection[int] = ()  # blocks that it writes
    computed: Pass | None = None  # None: it has nothing to compute
    traced: Sequence[m.StepTraced] = ()  # what is told of it, once its end is known
    is_busy: bool = False  # whether the next step may find something to compute


class EngineCore:
    """The engine without process or threads: commands come in, steps compute, events go out."""

    def __init__(
        self,
        settings: EngineSettings,
        device: Device,
        connector: KVConnector,
        clock: Callable[[], float],
        wake: Callable[[], None],
        store: KVConnector | None = None,
        read_commands: Callable[[], None] = lambda: None,
        compile_grammar: Compiler | None = None,
        grammar_bounds: GrammarBounds | None = None,
        drafter: Drafter | None = None,
        batch_time: Callable[[], BatchTime | None] = lambda: None,
    ) -> None:
        """`connector` hands over what a prefill computes. `store` keeps what any worker computed; if it is None and
        `connector` is a store, that is the store. `read_commands` calls `handle` with the commands that have come until
        now. Without `compile_grammar`, guided requests are refused. `drafter` guesses tokens ahead; if it is None and
        `settings.speculation` is "ngram", an n-gram drafter does. `batch_time`: how long a step takes, if that is known
        well enough to decide by it."""
        store = store or (connector if connector.is_store else NoStore())
        info = device.info
        self._device = device
        self._connector = connector
        self._connectors = [connector] if store is connector else [connector, store]
        self._clock = clock
        self._read_commands = read_commands
        self._events: list[m.Event] = []
        self._has_arrivals = False  # some that are not in the scheduler's queue yet
        self._has_newcomers = False  # in the scheduler's queue, since it last admitted any
        self._goes_by_slack = False  # as was told last
        self._traced: set[str] = set()  # ids of requests that are told of their steps
        self._counted: deque[int] = deque(maxlen=MAX_COUNTED)
        self.blocks = BlockManager(
            info.num_blocks,
            info.spec.block_size,
            root_hash(info.spec.fingerprint()),
            enable_prefix_caching=settings.enable_prefix_caching,
            num_host_blocks=info.num_host_blocks,
            keep_evicted=settings.host_cache_gb > 0,
            has_store=store.keeps_blocks,
            retain_share=settings.retain_share,
            retain_tenant_share=settings.retain_tenant_share,
        )
        self.remote_kv = RemoteKV(connector, store, self.blocks, clock, self._emit)
        self._arrivals = Arrivals(
            self.remote_kv.lookups,
            None if compile_grammar is None else PendingGrammars(compile_grammar, clock, wake, grammar_bounds),
            max_model_len=info.max_model_len,
            hidden_size=info.hidden_size,
            clock=clock,
            emit=self._emit,
        )
        self._hints = CacheHints(self.blocks, self.remote_kv, self._emit)
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=settings.max_num_seqs,
                max_num_batched_tokens=settings.max_num_batched_tokens,
                chunk_size=settings.chunk_size,
                max_model_len=info.max_model_len,
                eos_token_ids=frozenset(info.eos_token_ids),
                window=info.window,
                queue_policy=settings.queue_policy,
                slo_late=settings.slo_late,
                preemption_mode=settings.preemption_mode,
                announce=settings.announce,
                handoff_is_store=store is connector,
            ),
            self.blocks,
            self.remote_kv.waiting_room,
            batch_time,
        )
        self._housekeeping = Housekeeping(
            self.scheduler, self.blocks, self.remote_kv, self._hints, device, self._take_back, wake
        )
        self._integrity = IntegrityReport(self.scheduler.check_integrity, clock)
        self._forward = ForwardPass(device, self.scheduler.config.eos_token_ids, self.scheduler.stop, self._emit)
        if not settings.enable_prefix_caching:
            log.warning(
                "without the prefix cache each of n answers computes its whole prompt, and beams whole sequences"
            )
        if drafter is None and settings.speculation == "ngram":
            drafter = NgramDrafter()
        if drafter is None and settings.speculation != "none":
            raise ValueError(f"nobody drafts for speculation {settings.speculation!r}")
        self._speculation = (
            None
            if drafter is None
            else Speculation(drafter, settings.speculation_tokens, self.scheduler.config, info.free_rows, batch_time)
        )
        self._under_way: deque[BegunStep] = deque()  # two at most
        self._uncopied: SchedulerOutput | None = None  # a step that was decided and not begun, if it has copies
        self._num_ahead = 0  # steps begun ahead since a step was last decided with none under way
        self._runs_ahead = settings.run_ahead and self._speculation is None  # a guess needs the token before
        self.may_run_ahead: Callable[[], bool] = lambda: True  # may be set
        shards = [(plane.cache, plane.spec) for plane in device.planes()]
        for one in self._connectors:
            one.register_shards(shards, wake)

    # ------------------------------------------------------------------------------------------ interface

    def ready(self) -> m.EngineReady:
        info = self._device.info
        return m.EngineReady(
            spec=info.spec,
            is_read_from_memory=not self._connector.is_store,
            num_blocks=info.num_blocks,
            max_model_len=info.max_model_len,
            vocab_size=info.vocab_size,
            eos_token_ids=list(info.eos_token_ids),
            dtype_reason=info.dtype_reason,
            device=info.device,
            device_reason=info.device_reason,
            kernels=info.kernels,
            kernels_reason=info.kernels_reason,
            peer=self._connector.describe(),
        )

    def handle(self, command: m.Command) -> None:
        """Takes one command in. A command that cannot be carried out becomes an event; it raises nothing."""
        self._copy_now()
        remote_kv = self.remote_kv
        match command:
            case m.AddRequest():
                if command.traceparent:
                    self._traced.add(command.request_id)
                self._count(command.request_id)
                self._arrivals.add(command)
                self._queue_ready()
            case m.Embed():
                if command.traceparent:
                    self._traced.add(command.request_id)
                self._count(command.request_id)
                self._arrivals.embed(command)
                self._queue_ready()
            case m.RemoteBlocksPublished():
                remote_kv.published(command)
            case m.RemoteFirstToken(request_id, token):
                if request := remote_kv.first_token(request_id):
                    new = self.scheduler.append(request, token)
                    if new.finish_reason is not None:
                        self._report_token(new, is_relayed=True)
            case m.PrefillLeaseEnded(request_id, reason):
                remote_kv.lease_ended(request_id, reason)
            case m.RemotePrefillFailed(request_id, reason):
                remote_kv.prefill_failed(request_id, reason)
            case m.Release(request_id):
                self._arrivals.drop(request_id)
                self.scheduler.release(request_id)
                remote_kv.release(request_id)
                self._traced.discard(request_id)
            case m.StopPrefill(request_id):
                self._arrivals.drop(request_id)
                self.scheduler.stop(request_id)
            case m.LendBlocks(request_id, first, stop):
                remote_kv.lend(request_id, first, stop)
            case m.EndLoan(request_id):
                remote_kv.end_loan(request_id)
            case m.AddPeer(peer):
                if reason := remote_kv.add_peer(peer):
                    report_unreachable(reason)
            case m.GetStatus(call_id):
                self._events.append(m.Status(call_id, self.load, self._integrity.get()))
            case m.HintCache():
                self._hints.handle(command, self._clock())
            case m.GetBlocks():
                self._events.append(m.BlocksListed(b"".join(self.blocks.names())))
        self._take_back()

    def stood_still(self, seconds: float) -> None:
        """This process was frozen for that long, so every block that is being read counts as lost: a prefill worker may
        have reused its blocks meanwhile, and the front, which may have been frozen too, may not know yet."""
        self.remote_kv.all_leases_ended(f"the worker stood still for {seconds:.1f} s")

    def step(self) -> bool:
        """One whole step. Returns False if there was nothing to compute. Loops that send events use its three parts."""
        return self.end(self.begin(self.prepare()))

    def prepare(self) -> SchedulerOutput:
        """First part: takes in finished transfers, decides the batch, starts transfers.

        Its events should be sent before the step ends, which may take long. If a step is under way, decides the one
        after it, or nothing yet.
        """
        if self._under_way:
            return self._prepare_ahead()
        if self._uncopied is not None:
            self._copy_now()  # the step before was never begun
        self._num_ahead = 0
        if self._has_arrivals:
            self._queue_ready()
        self.take_in_transfers()
        now = self._clock()
        self._housekeeping.due(now)
        drafts = {} if self._speculation is None else self._drafts(self._speculation)
        output = self.scheduler.schedule(now, drafts)
        self._has_newcomers = False
        if self.scheduler.slack is not None or self._goes_by_slack:
            self._report_order()
        if output.has_effects or not self.remote_kv.is_idle:
            self._carry_out(output, now)
        self._housekeeping.report()
        return output

    def _prepare_ahead(self) -> SchedulerOutput:
        if self._has_arrivals:
            self._queue_ready()
        self.take_in_transfers()
        if self._num_ahead >= MAX_AHEAD or not self._goes_ahead or self.remote_kv.has_prefetches:
            return SchedulerOutput()
        output = self.scheduler.schedule_ahead(self._under_way[-1].output)
        if output.host_copies:
            self._uncopied = output
        return output

    @property
    def _goes_ahead(self) -> bool:
        return self._runs_ahead and self.may_run_ahead()

    def begin_remote(self) -> None:
        """Admits newcomers whose prompt a prefill worker has to compute. Called in mid-step, so that the worker hears
        of them before the step is done."""
        if self._has_arrivals:
            self._queue_ready()
        if not self._has_newcomers:
            return
        self._has_newcomers = False
        output = self.scheduler.admit_remote(self._clock())
        if output.host_copies:
            self._device.copy(output.host_copies)
        self.remote_kv.start()
        if output.parts:
            self._hand_over(output.parts, output.publishes)
            self.take_in_transfers()  # P2P publications are ready at once

    def begin(self, output: SchedulerOutput) -> BegunStep:
        """Second part: begins to compute the batch, and holds the blocks that it writes until `end`. If a request gives
        one up meanwhile, no newcomer gets it.

        Commands may have come since `prepare` decided: what they released is not computed.
        """
        has_ended = output.drop_ended()
        if not output.num_tokens:
            self._copy_now()
            return BegunStep(output, is_busy=has_ended or (bool(output.preempted) and self.scheduler.has_work))
        written = output.written_blocks(self.blocks.block_size)
        traced = self._first_steps(output) if self._traced else ()
        before = self._under_way[-1].computed if self._under_way else None
        self.blocks.begin_writes(written)
        try:
            begun = BegunStep(output, written, self._forward.begin(output, before), traced, is_busy=True)
        except BaseException:
            self.blocks.end_writes(written)
            raise
        self._uncopied = None
        self._num_ahead += before is not None
        self._under_way.append(begun)
        return begun

    def end(self, begun: BegunStep, meanwhile: Callable[[], None] | None = None) -> bool:
        """Third part: waits for what `begin` began, once, or for the step before that if the engine runs ahead. Returns
        False if there was nothing to compute and the next step would find nothing either, until time passes or a
        message comes.

        `meanwhile` is called many times in mid-step and may call `handle`, `take_in_transfers`, `begin_remote` and
        `take_events`. A device that can gives the step up if nobody wants it any more, or somebody else is in a hurry.
        """
        if begun.computed is not None and len(self._under_way) == 1 and self._goes_ahead:
            return True  # the next one is begun first
        if self._under_way:
            begun = self._under_way.popleft()
        if begun.computed is None:
            return begun.is_busy
        meanwhile = meanwhile or self.take_in_transfers
        if self._device.info.gives_up:
            meanwhile = partial(self._go_on, begun.output, meanwhile)
        try:
            tokens = self._forward.end(begun.computed, meanwhile)
        finally:
            self.blocks.end_writes(begun.written)
        if tokens is None:
            self.scheduler.give_up(begun.output)
        else:
            self._take_in_results(begun, begun.computed, tokens)
        self.take_in_transfers()
        return True

    def _take_in_results(self, begun: BegunStep, computed: Pass, tokens: Sequence[Sequence[SampledToken]]) -> None:
        if begun.traced:
            self._report_traced(begun)
        result = self.scheduler.update(begun.output, tokens)
        if result.parts or result.publishes:
            self._hand_over(result.parts, result.publishes)
        for new in result.tokens:
            self._report_token(new)
        if computed.embeds:
            self._report_embeddings(begun.output)
        if self.scheduler.slack is not None or self._goes_by_slack:
            self._report_order()

    def _go_on(self, output: SchedulerOutput, meanwhile: Callable[[], None]) -> None:
        """Passes messages in mid-step. Raises `StepGivenUp` if the rest of the step should not be computed."""
        meanwhile()
        if why := self.scheduler.why_give_up(output, self._clock()):
            report_given_up(why)
            raise StepGivenUp

    def repeat(self, requests: Sequence[Request], num_steps: int) -> None:
        """Does what so many steps of these requests come to, for simulations (`Scheduler.repeat`). Tells only of those
        that end with the last step."""
        self._copy_now()
        for new in self.scheduler.repeat(requests, num_steps):
            if new.finish_reason is not None:
                self._report_token(new)

    def _first_steps(self, output: SchedulerOutput) -> list[m.StepTraced]:
        """Of traced requests: those that compute their prompt, or their first token after it."""
        now = self._clock()
        return [
            m.StepTraced(
                request_id=request.request_id,
                start=now,
                end=now,
                num_tokens=num_new,
                num_computed_tokens=output.start(request),
                num_requests=len(output.num_tokens),
            )
            for request, num_new in output.num_tokens.items()
            if request.request_id in self._traced and output.start(request) <= request.num_prompt_tokens
        ]

    def take_in_transfers(self) -> None:
        """Takes in the results of transfers. May be called at any time between two other calls, also in mid-step."""
        if self.remote_kv.is_idle:
            return
        for reason in self.remote_kv.take_in(self._read_commands):
            report_not_stored(reason)
        self._take_back()

    def _emit(self, event: m.Event) -> None:
        self._events.append(event)

    def take_events(self) -> list[m.Event]:
        """Events since the last call."""
        events, self._events = self._events, []
        return events

    def take_counted(self) -> tuple[int, ...]:
        """Tags (`request_tag`) of the requests that came since the last call. To be told with the load that counts
        them: their routers add them to the load until then."""
        counted = tuple(self._counted)
        self._counted.clear()
        return counted

    def _count(self, engine_id: str) -> None:
        self._counted.append(request_tag(m.request_id_of(engine_id)))

    def take_block_news(self) -> list[m.Event]:
        """Names of blocks that became findable or were lost since the last call, as one event; none if nothing
        changed."""
        return [m.BlocksChanged(*self.blocks.news.take())] if self.blocks.news else []

    @property
    def has_work(self) -> bool:
        is_ahead = self._runs_ahead and bool(self._under_way)
        return self.scheduler.has_work or len(self._arrivals) > 0 or is_ahead

    @property
    def load(self) -> WorkerLoad:
        scheduler, blocks, arrivals = self.scheduler, self.blocks, self._arrivals
        num_prompts, num_tokens = scheduler.queued_prompts
        return WorkerLoad(
            num_requests_running=scheduler.num_running + scheduler.num_held_back,
            num_requests_waiting=scheduler.num_waiting - scheduler.num_held_back + len(arrivals),
            num_queued_prompt_tokens=num_tokens + arrivals.num_prompt_tokens,
            num_queued_prompts=num_prompts + len(arrivals),
            queued_by_slack=scheduler.queued_by_slack(self._clock()),
            num_blocks=blocks.num_blocks,
            num_free_blocks=blocks.num_empty_blocks,
            num_cached_blocks=blocks.num_cached_blocks,
            num_leases=scheduler.num_leases,
            num_unstored_blocks=len(blocks.write_back),
            goes_by_slack=scheduler.goes_by_slack,
            room_after=scheduler.room_after,
        )

    def close(self) -> None:
        for connector in self._connectors:
            connector.close()
        self._arrivals.close()

    # ------------------------------------------------------------------------------------------ internals

    def _queue_ready(self) -> None:
        """Adds requests to the queue once their grammar is compiled and the store has answered."""
        for request in self._arrivals.take_ready():
            self.scheduler.add(request)
            self._has_newcomers = True
        self._has_arrivals = self._arrivals.has_pending

    def _take_back(self) -> None:
        """Gives requests whose wait for KV is over back to the scheduler."""
        for settled in self.remote_kv.take_settled():
            report_settled(settled)
            self.scheduler.take_back(settled.request)

    def _carry_out(self, output: SchedulerOutput, now: float) -> None:
        """Does all that was decided but the forward pass: what that needs, or others wait for."""
        if output.host_copies:
            self._uncopied = output
            if output.publishes or self.remote_kv.waits_for_copies:
                self._copy_now()
        if output.parts or output.publishes:
            self._hand_over(output.parts, output.publishes)
        if not self.remote_kv.is_idle:
            self.remote_kv.start()
        for request in output.preempted:
            report_preempted(request, is_displaced=request is output.displaced)
        for late in output.late:
            self._report_late(late)
        if not self.remote_kv.is_idle:
            self.take_in_transfers()  # P2P publications are ready at once
            self._housekeeping.rest(now)

    def _copy_now(self) -> None:
        """Carries out the copies of a step that was decided and has not begun, as something else comes first that may
        read or overwrite their blocks."""
        if (output := self._uncopied) is not None:
            self._device.copy(output.host_copies)
            output.host_copies, self._uncopied = [], None

    def _drafts(self, speculation: Speculation) -> dict[Request, list[int]]:
        speculation.follow(self.scheduler.running)
        return speculation.drafts(self.scheduler.decodes, self.scheduler.decode_shape)

    def _report_traced(self, begun: BegunStep) -> None:
        now = self._clock()
        self._events += [msgspec.structs.replace(step, end=now) for step in begun.traced]
        if self._under_way:  # the device begins with it now
            after = self._under_way.popleft()
            started = [msgspec.structs.replace(step, start=now) for step in after.traced]
            self._under_way.appendleft(replace(after, traced=started))

    def _report_order(self) -> None:
        goes_by_slack = self.scheduler.goes_by_slack
        if goes_by_slack is not self._goes_by_slack:
            self._goes_by_slack = goes_by_slack
            report_order(goes_by_slack=goes_by_slack)

    def _report_late(self, late: LateRequest) -> None:
        report_late(late)
        if late.is_refused:
            request_id = late.request.request_id
            self._traced.discard(request_id)
            reason = f"its latency targets cannot be met here any more: {late.reason}"
            self._events.append(m.RequestFailed(request_id, OverloadedError.grpc_code, reason))

    def _report_embeddings(self, output: SchedulerOutput) -> None:
        for request in output.num_tokens:
            if request.embed is None or request.num_missing_tokens or request.request_id not in self.scheduler.requests:
                continue
            queue_s = (request.scheduled_time or request.arrival_time) - request.arrival_time
            values = embedding(request, request.embed)
            self._events.append(m.Embedded(request.request_id, values, request.num_cached_tokens, queue_s))
            self.scheduler.release(request.request_id)

    def _hand_over(self, parts: Sequence[Request], publishes: Sequence[Publish]) -> None:
        """Publishes blocks. A part is told to be done before its last blocks are: once the decode worker has those, it
        listens no more."""
        for part in parts:
            queue_s = (part.scheduled_time or part.arrival_time) - part.arrival_time
            self._events.append(
                m.TokensGenerated(
                    request_id=part.request_id, tokens=[], num_cached_tokens=part.num_cached_tokens, queue_s=queue_s
                )
            )
        if publishes:
            self.remote_kv.publish(publishes)

    def _report_token(self, new: NewToken, *, is_relayed: bool = False) -> None:
        request, reason = new.request, new.finish_reason
        self._events.append(
            m.TokensGenerated(
                request_id=request.request_id,
                tokens=[] if is_relayed else [new.token],
                finish_reason=reason,
                stop_token_id=request.stop_token_id if reason is FinishReason.STOP else None,
                num_cached_tokens=request.num_cached_tokens,
                num_preemptions=request.num_preemptions,
                queue_s=(request.scheduled_time or request.arrival_time) - request.arrival_time,
                num_drafted_tokens=request.drafts.num_drafted,
                num_accepted_tokens=request.drafts.num_accepted,
                fallback_reason=request.fallback_reason,
            )
        )
