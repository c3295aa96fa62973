"""One engine: takes commands, runs steps, gives events. Single-threaded, and ignorant of how messages travel.

A step is `schedule -> execute -> update`. Between steps come commands and the results of KV transfers. The engine
never waits for a transfer: a request that needs remote KV is not scheduled until its blocks are here.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from common import metrics
from common.block_hash import extra_keys, root_hash
from common.config import EngineSettings
from common.errors import BatonError
from common.types import FinishReason, KVCacheSpec, SampledToken, WorkerLoad
from engine import messages as m
from engine.batch import BlockCopy, SampleInput, SequenceInput
from engine.blocks.block_manager import BlockManager, CacheCounts, HostCopy
from engine.blocks.host_cache import allocate_host_cache
from engine.remote_kv.transfers import Transfers, WrittenBlock
from engine.request import Request
from engine.scheduler import NewToken, Publish, Scheduler, SchedulerConfig, SchedulerOutput
from kv_store.base import BlockRef, KVConnector, Lookup, TransferKind

log = logging.getLogger(__name__)

VERIFY_STORED_S = 60.0  # what the store took is believed to be there for this long, then looked at when it is used
INTEGRITY_SHARE = 0.05  # most of the engine's time that status calls may take for integrity checks
INTEGRITY_AGE_S = 1.0  # oldest result of an integrity check that a status call gets
WRITE_TOKENS = 256  # of one write to the store: stores keep so many together, and a handoff waits for one at most


class Runner(Protocol):
    """The model on its device. `engine.model_runner.ModelRunner`, or a fake in tests."""

    spec: KVCacheSpec
    kv_cache: torch.Tensor  # [num_blocks, *spec.block_shape]
    num_blocks: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: list[int]

    def execute(
        self,
        sequences: Sequence[SequenceInput],
        copies: Sequence[BlockCopy] = (),
        between_layers: Callable[[], None] = ...,
    ) -> list[SampledToken | None]: ...


@dataclass(slots=True)
class _TransferNews:
    """What `poll` brought for one request."""

    refs: list[BlockRef] = field(default_factory=list)
    published_lost: list[int] = field(default_factory=list)
    arrived: list[int] = field(default_factory=list)
    fetch_lost: list[int] = field(default_factory=list)
    failure: str = ""
    num_bytes: int = 0
    elapsed_s: float = 0.0  # of the slowest block, from the connector's call to its result


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
    ) -> None:
        """`connector` hands over what a prefill computes. `store` keeps what any worker computed; where it is None and
        `connector` is a store, that is it. `read_commands` calls `handle` with what has come until now."""
        self._runner = runner
        self._connector = connector
        self._store = connector if store is None and connector.is_store else store
        self._clock = clock
        self._read_commands = read_commands
        self._host_cache = allocate_host_cache(settings, runner.spec, runner.kv_cache.device)
        self.blocks = BlockManager(
            runner.num_blocks,
            runner.spec.block_size,
            root_hash(runner.spec.fingerprint()),
            enable_prefix_caching=settings.enable_prefix_caching,
            num_host_blocks=len(self._host_cache),
            keep_evicted=settings.host_cache_gb > 0,
            has_store=self._store is not None,
        )
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=settings.max_num_seqs,
                max_num_batched_tokens=settings.max_num_batched_tokens,
                chunk_size=settings.chunk_size,
                max_model_len=runner.max_model_len,
                eos_token_ids=frozenset(runner.eos_token_ids),
                preemption_mode=settings.preemption_mode,
                announce=settings.announce,
                handoff_is_store=self._store is connector,
            ),
            self.blocks,
        )
        self._transfers = Transfers(connector, self._store, self.blocks, clock)
        self._lookups: dict[str, tuple[Request, Lookup]] = {}  # requests that wait for what the store says
        self._events: list[m.Event] = []
        self._verify_time = clock() + VERIFY_STORED_S
        self._write_failure = ""  # the last one logged
        self._integrity_result = ""
        self._integrity_due = self._verify_time - VERIFY_STORED_S  # no status call checks again before this time
        self._connectors = [connector] if self._store in (None, connector) else [connector, self._store]
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
            peer=self._connector.describe(),
        )

    def handle(self, command: m.Command) -> None:
        """Takes one command in. Never raises for what a command asks."""
        match command:
            case m.AddRequest():
                self._add(command)
            case m.BlocksAnnounced(request_id, refs, failed_indexes, failure):
                self._transfers.fetch(request_id, self.scheduler.announce(request_id, refs))
                self.scheduler.publications_lost(request_id, failed_indexes, failure)
                self._settle_remote(request_id)
            case m.RemoteFirstToken(request_id, token):
                new = self.scheduler.first_token(request_id, token)
                if new is not None and new.finish_reason is not None:
                    self._report_token(new, is_relayed=True)
                self._settle_remote(request_id)
            case m.PrefillLeaseEnded(request_id, reason):
                self.scheduler.lease_ended(request_id, reason)
            case m.RemotePrefillFailed(request_id, reason):
                self.scheduler.remote_failed(request_id, reason)
                self._settle_remote(request_id)
            case m.Release(request_id):
                self._lookups.pop(request_id, None)
                self.scheduler.release(request_id)
                self._transfers.release(request_id)
            case m.StopPrefill(request_id):
                self._lookups.pop(request_id, None)
                self._stop(request_id)
            case m.AddPeer(peer):
                try:
                    self._connector.add_peer(peer)
                except BatonError as error:  # fetches from it will fail, and say so with their request's id
                    log.warning("cannot reach a peer's KV cache", extra={"reason": str(error)})
            case m.GetStatus(call_id):
                self._events.append(m.Status(call_id, self.load, self._integrity()))
        self._settle_touched()

    def stood_still(self, seconds: float) -> None:
        """This process did nothing for that long. Whoever announced blocks may have given it up, and have overwritten
        them, and its front may have stood still with it and not know yet: what is being read counts as lost."""
        self.scheduler.all_leases_ended(f"the worker stood still for {seconds:.1f} s")

    def step(self) -> bool:
        """One whole step; False where there was nothing to compute. Loops that send events use the two halves."""
        return self.execute(self.prepare())

    def prepare(self) -> SchedulerOutput:
        """First half: takes in finished transfers, decides the batch, starts what others wait for.

        Its events should be sent before the second half, which may take long.
        """
        self._take_in_lookups()
        self.take_in_transfers()
        self._give_up_overdue()
        now = self._clock()
        if now >= self._verify_time:
            self.blocks.age_stored()
            self._verify_time = now + VERIFY_STORED_S
        if self._transfers.may_write and not self.scheduler.has_work:
            self.blocks.bring_up_unstored(WRITE_TOKENS)
            self._copy(self.blocks.take_copies())
            self._write_back()
        output = self.scheduler.schedule(now)
        self._carry_out(output)
        self._count()
        self.take_in_transfers()  # P2P publications are ready at once
        return output

    def execute(self, output: SchedulerOutput, between_layers: Callable[[], None] | None = None) -> bool:
        """Second half: computes the batch; False where it is empty and only time or a message can help.

        `between_layers` is called many times in mid-step and may call `handle`, `take_in_transfers` and `take_events`:
        blocks that become free there are not given to anyone before the next `prepare`.
        """
        if not output.num_tokens:
            return bool(output.preempted) and self.scheduler.num_running > 0
        result = self.scheduler.update(output, self._compute(output, between_layers or self.take_in_transfers))
        for publish in result.publishes:
            self._publish(publish)
        for new in result.tokens:
            self._report_token(new)
        self.take_in_transfers()
        return True

    def take_events(self) -> list[m.Event]:
        """Events since the last call."""
        events, self._events = self._events, []
        return events

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._lookups)

    @property
    def load(self) -> WorkerLoad:
        scheduler, blocks = self.scheduler, self.blocks
        return WorkerLoad(
            num_requests_running=scheduler.num_running,
            num_requests_waiting=scheduler.num_waiting + len(self._lookups),
            num_queued_prompt_tokens=scheduler.num_queued_prompt_tokens
            + sum(request.num_prompt_tokens for request, _ in self._lookups.values()),
            num_blocks=blocks.num_blocks,
            num_free_blocks=blocks.num_empty_blocks,
            num_cached_blocks=blocks.num_cached_blocks,
            num_leases=scheduler.num_leases,
            num_unstored_blocks=len(blocks.unstored or ()),
        )

    def _integrity(self) -> str:
        """ "ok", or what is wrong. A check takes time in proportion to blocks and requests, and anybody may ask for the
        status. So the next checks are left out until the last one took only `INTEGRITY_SHARE` of the time since."""
        start = self._clock()
        if start >= self._integrity_due:
            self._integrity_result = "; ".join(self.scheduler.check_integrity()[:5]) or "ok"
            end = self._clock()
            self._integrity_due = end + min((end - start) / INTEGRITY_SHARE, INTEGRITY_AGE_S)
        return self._integrity_result

    def close(self) -> None:
        for connector in self._connectors:
            connector.close()

    # ------------------------------------------------------------------------------------------- commands

    def _add(self, command: m.AddRequest) -> None:
        num_tokens = len(command.prompt_token_ids) + len(command.output_token_ids)
        if not command.prompt_token_ids:
            self._fail(command.request_id, "INVALID_ARGUMENT", "prompt_token_ids: is empty")
            return
        if num_tokens >= self._runner.max_model_len:
            limit = self._runner.max_model_len
            reason = f"prompt_token_ids: {num_tokens} tokens leave no room in a context of {limit}"
            self._fail(command.request_id, "INVALID_ARGUMENT", reason)
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
        )
        self._lookups[request.request_id] = (request, self._find_in_store(request))
        self._take_in_lookups()

    def _take_in_lookups(self) -> None:
        """Admits requests, in the order of their arrival but for those whose answer is not there yet."""
        for request, lookup in list(self._lookups.values()):
            if lookup.num_blocks is not None:
                del self._lookups[request.request_id]
                request.num_stored_blocks = lookup.num_blocks
                if lookup.is_certain:  # what is here and was stored may be gone from there
                    self.blocks.doubt_stored(self._findable(request)[lookup.num_blocks :])
                self.scheduler.add(request)

    def _find_in_store(self, request: Request) -> Lookup:
        """Leading blocks of the prompt that the store holds, where the cache here does not hold as many."""
        if self._store is None or not self.blocks.enable_prefix_caching:
            return Lookup(0)
        num_cached = self.blocks.find_prefix(request)
        hashes = self._findable(request)
        return self._store.start_lookup(hashes) if num_cached < len(hashes) else Lookup(0)

    def _findable(self, request: Request) -> Sequence[bytes]:
        """Names of the full blocks that need not be computed: at least one token has to be."""
        return request.block_hashes[: (request.num_tokens - 1) // self.blocks.block_size]

    def _fail(self, request_id: str, grpc_code: str, message: str) -> None:
        self._events.append(m.RequestFailed(request_id, grpc_code, message))

    # ------------------------------------------------------------------------------------------ transfers

    def _publish(self, publish: Publish) -> None:
        self._transfers.publish(publish.request.request_id, publish.blocks)

    def take_in_transfers(self) -> None:
        """Passes on the results of KV transfers. Safe at any time between two calls, also in mid-step."""
        news: defaultdict[str, _TransferNews] = defaultdict(_TransferNews)
        results = list(self._transfers.poll())
        if results:
            self._read_commands()  # the end of a lease that came before a result makes that result worthless
        for ended in results:
            if isinstance(ended, WrittenBlock):
                self._take_in_written(ended)
                continue
            request_id, result, elapsed_s = ended
            item = news[request_id]
            item.num_bytes += result.num_bytes
            item.elapsed_s = max(item.elapsed_s, elapsed_s)
            item.failure = item.failure or result.error or ""
            if result.kind is TransferKind.FETCH:
                (item.arrived if result.error is None else item.fetch_lost).append(result.index)
            elif result.ref is not None:
                item.refs.append(result.ref)
                if self._store is self._connector:
                    self.blocks.mark_stored([result.ref.block_hash])
            else:
                item.published_lost.append(result.index)
        for request_id, item in news.items():
            self._report_transfers(request_id, item)
        self._settle_touched()
        self._write_back()

    def _give_up_overdue(self) -> None:
        """Transfers that hang count as failed, where there are other blocks to compute in. Not in mid-step: blocks that
        are free by then may still be written to."""
        for request_id, overdue in self._transfers.overdue().items():
            fetched = [result for result in overdue.results if result.kind is TransferKind.FETCH]
            if not self.scheduler.replace_blocks(request_id, [(one.index, one.block_id) for one in fetched]):
                continue
            news = _TransferNews(failure=overdue.results[0].error or "", elapsed_s=overdue.elapsed_s)
            for result in overdue.results:
                self._transfers.give_up(result)
                is_fetch = result.kind is TransferKind.FETCH
                (news.fetch_lost if is_fetch else news.published_lost).append(result.index)
            self._report_transfers(request_id, news)
        self._settle_touched()

    def _write_back(self) -> None:
        """Brings computed blocks to the store, a run at a time, while no request's transfer is under way."""
        if self._transfers.may_write and (blocks := self.blocks.next_unstored(WRITE_TOKENS)):
            self._transfers.write(blocks)

    def _take_in_written(self, written: WrittenBlock) -> None:
        self.blocks.end_write(written.block_hash, is_stored=written.error is None, is_new=written.num_bytes > 0)
        if written.error is not None and written.error != self._write_failure:
            log.warning("the store does not take computed KV", extra={"reason": written.error})
        self._write_failure = written.error or ""

    def _report_transfers(self, request_id: str, news: _TransferNews) -> None:
        if news.refs or news.published_lost:
            self._events.append(
                m.BlocksPublished(request_id, news.refs, news.published_lost, news.failure, news.elapsed_s)
            )
        if not (news.arrived or news.fetch_lost):
            return
        arrived, lost, failure = [], news.fetch_lost, news.failure
        self.scheduler.blocks_lost(request_id, lost, failure)
        for index in news.arrived:
            if reason := self.scheduler.block_arrived(request_id, index):
                lost, failure = [*lost, index], failure or reason
            else:
                arrived.append(index)
        self._events.append(m.BlocksFetched(request_id, arrived, lost, failure, news.num_bytes, news.elapsed_s))
        self._settle_remote(request_id)

    def _settle_touched(self) -> None:
        """Those that followed others' fetches. To settle one may end another's wait in turn."""
        while touched := self.scheduler.take_touched():
            for request_id in touched:
                self._settle_remote(request_id)

    def _settle_remote(self, request_id: str) -> None:
        settled = self.scheduler.settle_remote(request_id)
        if settled is None:
            return
        request, remote = settled
        if request.fallback_reason:
            metrics.worker_fallbacks.inc()
            log.warning(
                "remote KV did not arrive, computing it here",
                extra={
                    "request_id": request_id,
                    "reason": request.fallback_reason,
                    "num_computed_tokens": request.num_computed_tokens,
                    "num_prompt_tokens": request.num_prompt_tokens,
                },
            )
        elif remote.lost:  # a lookup is a hint: what has gone since is computed like any other token
            log.info("stored KV was gone", extra={"request_id": request_id, "reason": remote.failure})
        if request.mode is m.RequestMode.REMOTE:
            self._events.append(m.PrefillReceived(request_id, self._clock()))

    # ----------------------------------------------------------------------------------------------- step

    def _carry_out(self, output: SchedulerOutput) -> None:
        self._copy(output.host_copies)
        for publish in output.publishes:
            self._publish(publish)
        for fetch in output.store_fetches:
            self._transfers.fetch_stored(fetch.request.request_id, fetch.blocks)
        for request in output.remote_needed:
            if request.remote is not None:
                self._events.append(m.RemotePrefillNeeded(request.request_id, request.remote.ask_from))
        now = self._clock()
        self._events.extend(m.PrefillReceived(request.request_id, now) for request in output.remote_not_needed)
        for request in output.preempted:
            log.warning(
                "preempted: KV blocks ran out; raise --kv-cache-memory-gb or --num-blocks, or lower --max-num-seqs",
                extra={"request_id": request.request_id, "num_preemptions": request.num_preemptions},
            )

    def _count(self) -> None:
        counts = self.blocks.take_counts()
        if counts == CacheCounts():
            return
        for tier, number in (("device", counts.device_hits), ("host", counts.host_hits), ("store", counts.store_hits)):
            metrics.worker_kv_cache_hits.labels(tier).inc(number)
        for move in ("demoted", "promoted", "swapped_out", "stored", "dropped"):
            metrics.worker_kv_tier_moves.labels(move).inc(getattr(counts, move))

    def _copy(self, copies: list[HostCopy]) -> None:
        """Copies whole blocks, each after the one before it: a block may be left and filled again in one step. On a
        device nothing waits here; whatever uses the blocks is queued behind the copies."""
        for copy in copies:
            on_device, on_host = self._runner.kv_cache[copy.device_block], self._host_cache[copy.host_block]
            if copy.to_host:
                on_host.copy_(on_device, non_blocking=True)
            else:
                on_device.copy_(on_host, non_blocking=True)

    def _compute(self, output: SchedulerOutput, between_layers: Callable[[], None]) -> list[SampledToken | None]:
        sequences = [self._sequence(request, num_new) for request, num_new in output.num_tokens.items()]
        try:
            return self._runner.execute(sequences, between_layers=between_layers)
        except Exception:
            # One batch is lost, not the worker: its requests fail with their ids, all others go on.
            log.exception("a step failed", extra={"num_requests": len(sequences)})
            for request in list(output.num_tokens):
                self._stop(request.request_id)  # blocks of a prefill that were announced may be being read
                self._fail(request.request_id, "INTERNAL", "the engine failed to compute this request")
            return [None] * len(sequences)

    def _stop(self, request_id: str) -> None:
        if not self.scheduler.stop(request_id):
            self._transfers.release(request_id)

    def _sequence(self, request: Request, num_new: int) -> SequenceInput:
        start = request.num_computed_tokens
        return SequenceInput(
            token_ids=request.token_ids[start : start + num_new],
            num_computed_tokens=start,
            block_ids=request.block_ids,
            sample=self._sample(request) if num_new == request.num_missing_tokens else None,
        )

    def _sample(self, request: Request) -> SampleInput:
        return SampleInput(
            params=request.sampling_params,
            num_output_tokens=request.num_output_tokens,
            changes=request.logit_changes(self.scheduler.config.eos_token_ids),
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
                fallback_reason=request.fallback_reason,
            )
        )
