"""One engine: takes commands, runs steps, gives events. Single-threaded, and ignorant of how messages travel.

A step is `schedule -> execute -> update`. Between steps come commands and the results of KV transfers. The engine
never waits for a transfer: a request that needs remote KV is not scheduled until its blocks are here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Protocol

import torch

from common.block_hash import extra_keys, root_hash
from common.config import EngineSettings
from common.errors import InvalidArgumentError
from common.sampling import SamplingParams
from common.types import FinishReason, KVCacheSpec, SampledToken, WorkerLoad
from engine import messages as m
from engine.batch import BlockCopy, SampleInput, Scored, SequenceInput, StepOutput
from engine.blocks.block_manager import BlockManager
from engine.blocks.host_cache import allocate_host_cache, copy_blocks
from engine.blocks.host_tier import HostCopy
from engine.grammars import Compiler, Grammars
from engine.guide_state import GuideError
from engine.pooling import embedding, take_pooled
from engine.prompt_scores import MAX_EVENT_TOKENS, next_scores
from engine.remote_kv import RemoteKV
from engine.request import Request, RequestStatus
from engine.schedule import NewToken, SchedulerConfig, SchedulerOutput
from engine.scheduler import Scheduler
from engine.speculation.checks import accepted_tokens, check_rows
from engine.speculation.ngram import NgramDrafter
from engine.speculation.speculation import Drafter, Speculation, count_draft
from kv_store.base import KVConnector
from kv_store.no_store import NoStore

log = logging.getLogger(__name__)

INTEGRITY_SHARE = 0.05  # most of the engine's time that status calls may take for integrity checks
INTEGRITY_AGE_S = 1.0  # oldest result of an integrity check that a status call gets


class Runner(Protocol):
    """The model on its device. `engine.model_runner.ModelRunner`, or a fake in tests."""

    spec: KVCacheSpec
    kv_cache: torch.Tensor  # [num_blocks, *spec.block_shape]
    num_blocks: int
    max_model_len: int
    vocab_size: int
    hidden_size: int
    window: int  # tokens that the layer which sees the most sees; 0: all
    eos_token_ids: list[int]
    dtype_reason: str
    device: torch.device
    device_reason: str

    def execute(
        self,
        sequences: Sequence[SequenceInput],
        copies: Sequence[BlockCopy] = (),
        between_layers: Callable[[], None] = ...,
    ) -> list[StepOutput]: ...


class EngineCore:
    def __init__(
        self,
        settings: EngineSettings,
        runner: Runner,
        connector: KVConnector,
        clock: Callable[[], float],
        wake: Callable[[], None],
        store: KVConnector | None = None,
        read_commands: Callable[[], None] = lambda: None,
        compile_grammar: Compiler | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        """`connector` hands over what a prefill computes. `store` keeps what any worker computed; if it is None and
        `connector` is a store, that is the store. `read_commands` calls `handle` with what has come until now. Without
        `compile_grammar`, guided requests are refused. `drafter` guesses tokens ahead; None: what `settings` name."""
        store = store or (connector if connector.is_store else NoStore())
        self._runner = runner
        self._connector = connector
        self._connectors = [connector] if store is connector else [connector, store]
        self._clock = clock
        self._read_commands = read_commands
        self._events: list[m.Event] = []
        self._has_newcomers = False  # in the scheduler's queue, since it last admitted any
        self._integrity_result = ""
        self._integrity_due = 0.0  # no status call checks again before this time
        self._host_cache = allocate_host_cache(settings, runner.spec, runner.kv_cache.device)
        self.blocks = BlockManager(
            runner.num_blocks,
            runner.spec.block_size,
            root_hash(runner.spec.fingerprint()),
            enable_prefix_caching=settings.enable_prefix_caching,
            num_host_blocks=len(self._host_cache),
            keep_evicted=settings.host_cache_gb > 0,
            has_store=not isinstance(store, NoStore),
        )
        self._grammars = None if compile_grammar is None else Grammars(compile_grammar, clock, wake)
        self.remote_kv = RemoteKV(connector, store, self.blocks, clock, lambda event: self._events.append(event))
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=settings.max_num_seqs,
                max_num_batched_tokens=settings.max_num_batched_tokens,
                chunk_size=settings.chunk_size,
                max_model_len=runner.max_model_len,
                eos_token_ids=frozenset(runner.eos_token_ids),
                window=runner.window,
                queue_policy=settings.queue_policy,
                preemption_mode=settings.preemption_mode,
                announce=settings.announce,
                handoff_is_store=store is connector,
            ),
            self.blocks,
            self.remote_kv.room,
        )
        if drafter is None and settings.speculation == "ngram":
            drafter = NgramDrafter()
        if drafter is None and settings.speculation != "none":
            raise ValueError(f"nobody drafts for speculation {settings.speculation!r}")
        self._speculation = (
            None
            if drafter is None
            else Speculation(drafter, settings.speculation_tokens, self.scheduler.config, runner.device.type)
        )
        for one in self._connectors:
            one.register_kv_cache(runner.kv_cache, runner.spec, wake)

    # ------------------------------------------------------------------------------------------ interface

    def ready(self) -> m.EngineReady:
        runner = self._runner
        return m.EngineReady(
            spec=runner.spec,
            is_read_from_memory=not self._connector.is_store,
            num_blocks=runner.num_blocks,
            max_model_len=runner.max_model_len,
            vocab_size=runner.vocab_size,
            eos_token_ids=list(runner.eos_token_ids),
            dtype_reason=runner.dtype_reason,
            device=str(runner.device),
            device_reason=runner.device_reason,
            peer=self._connector.describe(),
        )

    def handle(self, command: m.Command) -> None:
        """Takes one command in. Never raises for what a command asks."""
        remote_kv = self.remote_kv
        match command:
            case m.AddRequest():
                self._add(command)
            case m.Embed():
                self._embed(command)
            case m.BlocksAnnounced():
                remote_kv.announced(command)
            case m.RemoteFirstToken(request_id, token):
                if request := remote_kv.room.first_token(request_id):
                    new = self.scheduler.append(request, token)
                    if new.finish_reason is not None:
                        self._report_token(new, is_relayed=True)
            case m.PrefillLeaseEnded(request_id, reason):
                remote_kv.room.lease_ended(request_id, reason)
            case m.RemotePrefillFailed(request_id, reason):
                remote_kv.room.failed(request_id, reason)
            case m.Release(request_id):
                self._drop_waiting(request_id)
                self.scheduler.release(request_id)
                remote_kv.transfers.release(request_id)
            case m.StopPrefill(request_id):
                self._drop_waiting(request_id)
                self.scheduler.stop(request_id)
            case m.LendBlocks(request_id, first, stop):
                remote_kv.lend(request_id, first, stop)
            case m.EndLoan(request_id):
                remote_kv.end_loan(request_id)
            case m.AddPeer(peer):
                remote_kv.add_peer(peer)
            case m.GetStatus(call_id):
                self._events.append(m.Status(call_id, self.load, self._integrity()))
            case m.GetBlocks():
                self._events.append(m.BlocksListed(b"".join(self.blocks.names())))
        self._take_back()

    def stood_still(self, seconds: float) -> None:
        """This process did nothing for that long. A prefill worker may have given its blocks up meanwhile and have
        overwritten them, and the front, which may have stood still too, may not know yet: what is being read counts as
        lost."""
        self.remote_kv.room.all_leases_ended(f"the worker stood still for {seconds:.1f} s")

    def step(self) -> bool:
        """One whole step. Returns False if there was nothing to compute. Loops that send events use the two halves."""
        return self.execute(self.prepare())

    def prepare(self) -> SchedulerOutput:
        """First half: takes in finished transfers, decides the batch, starts transfers.

        Its events should be sent before the second half, which may take long.
        """
        self._admit_answered()
        self.take_in_transfers()
        self.remote_kv.give_up_overdue()
        self._take_back()
        now = self._clock()
        self.remote_kv.age_stored(now)
        if not self.scheduler.has_work:
            self.remote_kv.write_back_from_host(self._copy)
        drafts = self._speculation.drafts(self.scheduler.decodes) if self._speculation else {}
        output = self.scheduler.schedule(now, drafts)
        self._has_newcomers = False
        self._copy(output.host_copies)
        self.remote_kv.publish(output.publishes)
        self.remote_kv.start()
        for request in output.preempted:
            log.warning(
                "preempted: KV blocks ran out; raise --kv-cache-memory-gb or --num-blocks, or lower --max-num-seqs",
                extra={"request_id": request.request_id, "num_preemptions": request.num_preemptions},
            )
        self.blocks.take_counts().report()
        self.take_in_transfers()  # P2P publications are ready at once
        return output

    def begin_remote(self) -> None:
        """Admits newcomers whose prompt a prefill worker has to compute, so that it hears of them before the step under
        way is done. For mid-step."""
        self._admit_answered()
        if not self._has_newcomers:
            return
        self._has_newcomers = False
        output = self.scheduler.admit_remote(self._clock())
        self._copy(output.host_copies)
        self.remote_kv.start()

    def execute(self, output: SchedulerOutput, between_layers: Callable[[], None] | None = None) -> bool:
        """Second half: computes the batch. Returns False if it is empty and only time or a message can help.

        `between_layers` is called many times in mid-step and may call `handle`, `take_in_transfers`, `begin_remote` and
        `take_events`. The blocks that the step writes are held: if a request gives one up there, no newcomer gets it.
        """
        if not output.num_tokens:
            return bool(output.preempted) and self.scheduler.num_running > 0
        written = output.written_blocks(self.blocks.block_size)
        self.blocks.hold(written)
        try:
            tokens = self._compute(output, between_layers or self.take_in_transfers)
        finally:
            for block_id in written:
                self.blocks.unhold(block_id)
        result = self.scheduler.update(output, tokens)
        self.remote_kv.publish(result.publishes)
        for new in result.tokens:
            self._report_token(new)
        self._report_embeddings(output)
        self.take_in_transfers()
        return True

    def take_in_transfers(self) -> None:
        """Takes in what transfers have brought. Safe at any time between two calls, also in mid-step."""
        self.remote_kv.take_in(self._read_commands)
        self._take_back()

    def take_events(self) -> list[m.Event]:
        """Events since the last call."""
        events, self._events = self._events, []
        return events

    def take_block_news(self) -> list[m.Event]:
        """What became of findable blocks since the last call, as one event; none if nothing did."""
        return [m.BlocksChanged(*self.blocks.news.take())] if self.blocks.news else []

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or len(self.remote_kv.lookups) > 0 or self._num_without_grammar > 0

    @property
    def load(self) -> WorkerLoad:
        scheduler, blocks, lookups = self.scheduler, self.blocks, self.remote_kv.lookups
        return WorkerLoad(
            num_requests_running=scheduler.num_running + scheduler.num_held_back,
            num_requests_waiting=scheduler.num_waiting
            - scheduler.num_held_back
            + len(lookups)
            + self._num_without_grammar,
            num_queued_prompt_tokens=scheduler.num_queued_prompt_tokens
            + lookups.num_prompt_tokens
            + (self._grammars.num_prompt_tokens if self._grammars is not None else 0),
            num_blocks=blocks.num_blocks,
            num_free_blocks=blocks.num_empty_blocks,
            num_cached_blocks=blocks.num_cached_blocks,
            num_leases=scheduler.num_leases,
            num_unstored_blocks=len(blocks.write_back),
        )

    def _integrity(self) -> str:
        """What is wrong, or "ok". A check takes time in proportion to blocks and requests, and anybody may ask for the
        status. So no status call checks again until the last check took only `INTEGRITY_SHARE` of the time since."""
        start = self._clock()
        if start >= self._integrity_due:
            self._integrity_result = "; ".join(self.scheduler.check_integrity()[:5]) or "ok"
            end = self._clock()
            self._integrity_due = end + min((end - start) / INTEGRITY_SHARE, INTEGRITY_AGE_S)
        return self._integrity_result

    def close(self) -> None:
        for connector in self._connectors:
            connector.close()
        if self._grammars is not None:
            self._grammars.close()

    # ------------------------------------------------------------------------------------------- commands

    def _add(self, command: m.AddRequest) -> None:
        num_tokens = len(command.prompt_token_ids) + len(command.output_token_ids)
        if not command.prompt_token_ids:
            self._fail(command.request_id, "INVALID_ARGUMENT", "is empty", "prompt_token_ids")
            return
        if num_tokens >= self._runner.max_model_len:
            limit = self._runner.max_model_len
            reason = f"{num_tokens} tokens leave no room in a context of {limit}"
            self._fail(command.request_id, "INVALID_ARGUMENT", reason, "prompt_token_ids")
            return
        request = Request(
            request_id=command.request_id,
            token_ids=[*command.prompt_token_ids, *command.output_token_ids],
            num_prompt_tokens=len(command.prompt_token_ids),
            sampling_params=command.sampling_params,
            arrival_time=self._clock(),
            mode=command.mode,
            extra_keys=extra_keys(cache_salt=command.cache_salt),
            priority=command.priority,
            first_block=command.first_block,
            num_lendable_blocks=command.num_lendable_blocks,
            min_remote_tokens=command.min_remote_tokens,
        )
        is_scored = command.mode is not m.RequestMode.LOCAL or len(command.output_token_ids) > 0
        if command.sampling_params.prompt_logprobs is not None and not is_scored:
            request.num_unscored_tokens = request.num_prompt_tokens - 1
            request.needs_every_token = request.num_unscored_tokens > 0
        guided = command.sampling_params.guided
        if guided is None:
            self.remote_kv.lookups.start(request)
        elif self._grammars is None:
            self._fail(command.request_id, "INTERNAL", "this engine has no grammars")
        else:
            self._grammars.start(request, guided)
        self._admit_answered()

    def _drop_waiting(self, request_id: str) -> None:
        """A request that is not in the queue yet has ended."""
        self.remote_kv.lookups.drop(request_id)
        if self._grammars is not None:
            self._grammars.drop(request_id)

    @property
    def _num_without_grammar(self) -> int:
        return len(self._grammars) if self._grammars is not None else 0

    def _embed(self, command: m.Embed) -> None:
        if command.dimensions > self._runner.hidden_size:
            reason = f"must be at most {self._runner.hidden_size}, the model's, not {command.dimensions}"
            self._fail(command.request_id, "INVALID_ARGUMENT", reason, "dimensions")
            return
        request = Request(
            request_id=command.request_id,
            token_ids=list(command.prompt_token_ids),
            num_prompt_tokens=len(command.prompt_token_ids),
            sampling_params=SamplingParams(),
            arrival_time=self._clock(),
            extra_keys=extra_keys(cache_salt=command.cache_salt),
            embed=command,
            needs_every_token=command.pooling is m.Pooling.MEAN,
        )
        self.remote_kv.lookups.start(request)
        self._admit_answered()

    def _admit_answered(self) -> None:
        """Requests that waited for their grammar are looked up in the store; those that waited for that join the
        queue."""
        for answered in self._grammars.take_answered() if self._grammars is not None else ():
            if not answered.failure:
                self.remote_kv.lookups.start(answered.request)
            else:
                field = "sampling_params.guided" if answered.grpc_code == InvalidArgumentError.grpc_code else ""
                self._fail(answered.request.request_id, answered.grpc_code, answered.failure, field)
        for request in self.remote_kv.lookups.take_answered():
            self.scheduler.add(request)
            self._has_newcomers = True

    def _take_back(self) -> None:
        """Requests that waited for KV go on."""
        for request in self.remote_kv.take_settled():
            self.scheduler.take_back(request)

    def _fail(self, request_id: str, grpc_code: str, reason: str, field: str = "") -> None:
        self._events.append(m.RequestFailed(request_id, grpc_code, reason, field))

    def _report_embeddings(self, output: SchedulerOutput) -> None:
        for request in output.num_tokens:
            if request.embed is None or request.num_missing_tokens or request.request_id not in self.scheduler.requests:
                continue
            queue_s = (request.scheduled_time or request.arrival_time) - request.arrival_time
            values = embedding(request, request.embed)
            self._events.append(m.Embedded(request.request_id, values, request.num_cached_tokens, queue_s))
            self.scheduler.release(request.request_id)

    # ----------------------------------------------------------------------------------------------- step

    def _copy(self, copies: list[HostCopy]) -> None:
        copy_blocks(copies, self._runner.kv_cache, self._host_cache)

    def _compute(self, output: SchedulerOutput, between_layers: Callable[[], None]) -> list[list[SampledToken]]:
        strays = self._follow_grammars(output)
        sequences = [self._sequence(request, num_new) for request, num_new in output.num_tokens.items()]
        eos = self.scheduler.config.eos_token_ids
        checks = {request: check_rows(request, draft, eos) for request, draft in output.drafts.items()}
        rows = [*sequences, *(row for each in checks.values() for row in each)]
        try:
            results = self._runner.execute(rows, between_layers=between_layers)
        except Exception:
            # One batch is lost, not the worker: its requests fail with their ids, all others go on.
            log.exception("a step failed", extra={"num_requests": len(sequences)})
            for request in list(output.num_tokens):
                self.scheduler.stop(request.request_id)  # blocks of a prefill that were announced may be being read
                self._fail(request.request_id, "INTERNAL", "the engine failed to compute this request")
            return [[] for _ in sequences]
        drawn = iter(results[len(sequences) :])
        further = {request: list(islice(drawn, len(each))) for request, each in checks.items()}
        tokens = []
        for request, sequence, result in zip(output.num_tokens, sequences, results, strict=False):
            token = self._take(request, result)
            tokens.append([] if token is None else [token])
            if request in strays:
                self.scheduler.stop(request.request_id)
                self._fail(request.request_id, "INTERNAL", strays[request])
            elif token is None and sequence.sample is not None:
                self._end_without_token(request)
            elif token is not None and checks.get(request):
                tokens[-1] = accepted_tokens(token, checks[request], further[request])
                count_draft(request, len(checks[request]), len(tokens[-1]) - 1)
        return tokens

    def _take(self, request: Request, result: StepOutput) -> SampledToken | None:
        """The token, if there is one; what else came is kept with the request or reported."""
        if not isinstance(result, Scored):
            return take_pooled(request, result)
        if request.status is RequestStatus.RUNNING:  # else it was aborted in mid-step
            for start in range(0, len(result.scores), MAX_EVENT_TOKENS):
                scores = result.scores[start : start + MAX_EVENT_TOKENS]
                self._events.append(m.PromptScored(request.request_id, scores))
            request.num_unscored_tokens -= len(result.scores)
            request.needs_every_token = request.num_unscored_tokens > 0
        return result.token

    def _follow_grammars(self, output: SchedulerOutput) -> dict[Request, str]:
        """Guides take in the tokens that came. Returns requests whose tokens, sampled elsewhere, are not in their
        grammar, and why."""
        strays = {}
        for request, num_new in output.num_tokens.items():
            if request.guide is not None and num_new == request.num_missing_tokens:
                try:
                    request.guide.follow(request.token_ids, request.num_prompt_tokens)
                except GuideError as error:
                    strays[request] = str(error)
        return strays

    def _end_without_token(self, request: Request) -> None:
        """What it asks for leaves no token."""
        self.scheduler.stop(request.request_id)
        guide = request.guide
        field = "sampling_params.allowed_token_ids" if guide is None else "sampling_params.guided"
        reason = (guide and guide.failure) or "what it allows next is banned by other parameters"
        self._fail(request.request_id, "INVALID_ARGUMENT", f"the answer cannot go on: {reason}", field)

    def _sequence(self, request: Request, num_new: int) -> SequenceInput:
        start = request.num_computed_tokens
        is_last = num_new == request.num_missing_tokens
        if request.embed is not None:
            num_pooled = num_new if request.embed.pooling is m.Pooling.MEAN else int(is_last)
            return SequenceInput(
                token_ids=request.token_ids[start : start + num_new],
                num_computed_tokens=start,
                block_ids=request.block_ids,
                num_pooled=num_pooled,
            )
        return SequenceInput(
            token_ids=request.token_ids[start : start + num_new],
            num_computed_tokens=start,
            block_ids=request.block_ids,
            sample=self._sample(request) if is_last else None,
            score=next_scores(request, num_new),
        )

    def _sample(self, request: Request) -> SampleInput:
        return SampleInput(
            params=request.sampling_params,
            num_output_tokens=request.num_output_tokens,
            changes=request.logit_changes(self.scheduler.config.eos_token_ids),
            guide=request.guide,
        )

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
