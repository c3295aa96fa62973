"""One request's way to a prefill worker and back: asks a worker, passes on what the worker publishes, and releases it.

A worker that fails before the first token is followed by the next in the list, and so is one that refuses, as too many
wait there or as the request would miss its latency targets. When none is left, or the first token is known already, the
engine computes the rest itself; or it refuses the request, too. However the request ends, the stream is released
(`prefill_stream.py`).

A worker that is late is not given up: the next one is asked beside it (a hedge), once for each request. The first
worker to give a block or the token goes on, and the other one is released. Nothing that the other one said was passed
on, so the engine sees one worker at a time, and one first token.

    asked ──> late? ──> another one asked, too ──> first to give ──> its blocks and its token
      │                                                  └──────────> the other: released
      └─ fails: the next one, if there is no other

A prefill worker may ask for blocks that it lacks and that are here. They are lent until the worker has ended the
stream; if the stream breaks off, for as long as the worker may take to notice. One request lends to one worker: another
worker, asked after a failure or as a hedge, computes what it lacks.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import grpc

from common import metrics
from common.errors import OverloadedError, TransferError, UnavailableError
from common.grpc.options import DEADLINE_SLACK_S
from common.peers import milliseconds
from common.tracing import RequestSpans, SpanKind, TraceContext
from decode_service.prefill_events import PrefillEvents
from decode_service.prefill_stream import END_WAIT_S, PrefillStream
from engine import messages as m
from protos.baton.v1 import decode_pb2, prefill_pb2, types_pb2
from worker import convert
from worker.engine_stream import EngineStream
from worker.lease import lease_grace_s
from worker.shell import Worker

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Call:
    """One call of a prefill worker, for its span. Times are seconds of the monotonic clock."""

    address: str
    first_block: int
    start: float
    context: TraceContext
    is_hedge: bool
    end: float | None = None  # None: it ends with the request
    failure: str = ""


class PrefillLeg:
    """Its way is one task, from `start` to `end`; everything is called from the same event loop.

    `report` and `usage` are the request's: what the leg did is added to them. `asked_time`: when the request came to
    its router, in seconds of the monotonic clock here.
    """

    def __init__(
        self,
        worker: Worker,
        request: decode_pb2.DecodeRequest,
        stream: EngineStream,
        report: types_pb2.RequestReport,
        usage: types_pb2.Usage,
        asked_time: float,
        spans: RequestSpans | None = None,
    ) -> None:
        self.queue_ms = 0.0  # in the prefill worker that gave the first token
        self.publish_ms = 0.0  # of the last publication
        self.blamed: list[str] = []  # addresses of workers that failed, or lost to one that was asked beside them
        self.refused: list[str] = []  # of workers that could not take the request
        self._report = report
        self._usage = usage
        self._asked_time = asked_time
        self._spans = spans
        self._calls: list[_Call] = []  # in the order in which they were made, if the request is traced
        self._failures: list[str] = []
        self._worker = worker
        self._request = request
        self._stream = stream
        self._asked: list[PrefillStream] = []  # open, and one of them may give: two while a hedge is undecided
        self._giver: PrefillStream | None = None  # the one whose word is passed on
        self._hedge: PrefillStream | None = None
        self._stop_block = 0  # the prompt's blocks from here on are computed here; 0: none
        self.part_done_at: float | None = None  # when its part was computed, in seconds of the monotonic clock
        self._arrived: set[int] = set()
        self._has_first_token = False
        self._is_finished = False
        self._borrower: PrefillStream | None = None  # to whom blocks are or were lent
        self._num_lent = 0
        self._task: asyncio.Task[None] | None = None

    def start(self, first_block: int, stop_block: int, deadline: float | None) -> None:
        """Asks the workers in turn for the blocks from `first_block` on; for those before `stop_block` alone, and no
        token, unless that is 0. `deadline` is in the event loop's time; None for none."""
        self._stop_block = stop_block
        self._worker.hedges.request()
        self._task = asyncio.create_task(self._run(first_block, deadline))
        self._task.add_done_callback(self._ended)

    @property
    def is_started(self) -> bool:
        return self._task is not None

    def acknowledge(self, indexes: Sequence[int]) -> None:
        self._arrived.update(indexes)
        if self._giver is not None:
            received = prefill_pb2.BlocksReceived(indexes=indexes)
            self._giver.send(prefill_pb2.PrefillRequest(received=received))

    def lend(self, published: m.BlocksPublished) -> None:
        """Tells the worker that borrows which blocks are readable here, and which never will be."""
        if self._borrower is not None and not self._borrower.is_released:
            self._num_lent += len(published.blocks)
            self._borrower.send(prefill_pb2.PrefillRequest(lent=convert.blocks_ready(published)))

    def finish(self) -> None:
        """Call when nothing more is needed. Releases the blocks and half-closes the stream, which ends the lease.

        By then the engine must read none of the blocks, or know that nobody waits for them.
        """
        self._is_finished = True
        for stream in self._asked:
            stream.release()

    async def end(self) -> None:
        """Call after `finish`. Returns once each stream has ended; cancels a stream that takes too long."""
        if self._task is None:
            return
        done, _ = await asyncio.wait((self._task,), timeout=END_WAIT_S)
        if not done:
            extra = {"request_id": self._request.request_id}
            log.warning("a prefill worker does not end its stream, cancelling it", extra=extra)
            self._task.cancel()
            await asyncio.wait((self._task,))

    def add_spans(self, now: float) -> None:
        """Adds a span for each worker that was asked: those after the first one are linked to it."""
        if self._spans is None:
            return
        for call in self._calls:
            first = self._calls[0]
            self._spans.add(
                "prefill" if call is first else "prefill (hedge)" if call.is_hedge else "prefill (retry)",
                call.start,
                now if call.end is None else call.end,
                {"baton.prefill_worker": call.address, "baton.first_block": call.first_block},
                context=call.context,
                kind=SpanKind.CLIENT,
                links=() if call is first else (first.context,),
                error=call.failure,
            )

    # ------------------------------------------------------------------------------------------ internals

    def _note_end(self, address: str, failure: str = "") -> None:
        """Notes when the last call of a worker ended, if the request is traced."""
        for call in reversed(self._calls):
            if call.address == address and call.end is None:
                call.end, call.failure = time.monotonic(), failure
                return

    def _ended(self, task: asyncio.Task[None]) -> None:
        """If the leg ends by a defect, the engine is told to compute the rest, so that nobody waits for ever."""
        if task.cancelling():
            return
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is None:
            return
        log.error("the prefill leg failed", extra={"request_id": self._request.request_id}, exc_info=error)
        if self._is_finished:
            return
        reason = f"the prefill leg failed: {type(error).__name__}: {error}"
        with contextlib.suppress(UnavailableError):  # without an engine nobody waits
            self._stream.send(m.RemotePrefillFailed(self._stream.engine_id, reason))

    async def _run(self, first_block: int, deadline: float | None) -> None:
        addresses = deque(self._request.prefill_addresses)
        try:
            while addresses and not (self._has_first_token or self._is_over(deadline)):
                self._report.num_retries += bool(self._failures)
                await self._ask_next(addresses, first_block, deadline)
        finally:
            for stream in self._asked:
                stream.task.cancel()
                await stream.end()
        if self._is_over(deadline):
            return
        reason = self._failures[-1] if self._failures else "no prefill worker"
        self._stream.send(m.RemotePrefillFailed(self._stream.engine_id, reason))

    async def _ask_next(self, addresses: deque[str], first_block: int, deadline: float | None) -> None:
        """Asks the first of `addresses`, and the next one too if the first is late. Returns when both have ended."""
        self._giver = None
        first_block = self._first_missing(first_block)
        self._open(addresses.popleft(), first_block, deadline)
        late_s = self._request.hedge_after_s if self._request.HasField("hedge_after_s") and addresses else None
        while self._asked:
            tasks = [stream.task for stream in self._asked]
            done, _ = await asyncio.wait(tasks, timeout=late_s, return_when=asyncio.FIRST_COMPLETED)
            if not done and self._may_hedge():
                self._hedge = self._open(addresses.popleft(), first_block, deadline)
                self._note_hedge(self._asked[0].address, self._hedge.address)
            late_s = None
            for stream in [stream for stream in self._asked if stream.task.done()]:
                self._asked.remove(stream)
                self._close(stream, deadline)

    def _may_hedge(self) -> bool:
        if self._giver is not None or self._hedge is not None or self._is_finished:
            return False
        is_allowed = self._worker.hedges.spend(time.monotonic())
        metrics.worker_hedges.labels("asked" if is_allowed else "refused").inc()
        return is_allowed

    def _close(self, stream: PrefillStream, deadline: float | None) -> None:
        """Acts on the end of a stream. Raises an error that is a defect of this process."""
        error = stream.task.result()
        if error is None and self._is_finished:
            self._note_end(stream.address)
            return
        if error is None:
            error = TransferError("ended its stream before all blocks were here")
        if not self._is_over(deadline):  # else it may be no failure of the worker
            self._note_failure(stream.address, error)
            self._stream.send(m.PrefillLeaseEnded(self._stream.engine_id, self._failures[-1]))

    def _first_missing(self, first_block: int) -> int:
        while first_block in self._arrived:
            first_block += 1
        return first_block

    def _is_over(self, deadline: float | None) -> bool:
        """Whether nobody waits any more."""
        is_late = deadline is not None and asyncio.get_running_loop().time() >= deadline - DEADLINE_SLACK_S
        return self._is_finished or is_late

    def _note_failure(self, address: str, error: grpc.aio.AioRpcError | TransferError) -> None:
        code = error.code().name if isinstance(error, grpc.aio.AioRpcError) else "OK"
        words = f"{code}: {error.details()}" if isinstance(error, grpc.aio.AioRpcError) else str(error)
        metrics.worker_prefill_failures.labels(code).inc()
        self._failures.append(f"prefill worker {address}: {words}")
        is_refusal = code == OverloadedError.grpc_code
        (self.refused if is_refusal else self.blamed).append(address)
        self._note_end(address, words)
        extra = {"request_id": self._request.request_id, "address": address, "reason": words}
        if is_refusal:
            log.info("prefill worker refused the request", extra=extra)
        else:
            log.warning("prefill worker failed", extra=extra)

    def _note_hedge(self, address: str, beside: str) -> None:
        self._report.num_hedges += 1
        log.warning(
            "prefill worker is late, asking another one beside it",
            extra={
                "request_id": self._request.request_id,
                "address": address,
                "beside": beside,
                "after_s": self._request.hedge_after_s,
            },
        )

    def _open(self, address: str, first_block: int, deadline: float | None) -> PrefillStream:
        """Begins one stream to one worker."""
        ready = self._worker.ready
        lends = self._worker.settings.lend_blocks and ready.is_read_from_memory and self._borrower is None
        num_lendable = first_block if lends else 0
        events = PrefillEvents(
            first_block=first_block,
            num_blocks=self._stop_block or -(-len(self._request.prompt_token_ids) // ready.spec.block_size),
            vocab_size=ready.vocab_size,
            num_lendable=num_lendable,
            has_token=not self._stop_block,
        )
        # A request whose deadline passes is normally ended by its own call. This later deadline is a fallback.
        timeout = None if deadline is None else max(deadline - asyncio.get_running_loop().time(), 0.0) + END_WAIT_S
        context = None if self._spans is None else self._spans.own.child()
        start = self._start(first_block, ready.peer if num_lendable else b"", context)
        if context is not None:
            self._calls.append(_Call(address, first_block, time.monotonic(), context, bool(self._asked)))
        stream = PrefillStream(self._worker, address, start, events, self._take_in, timeout)
        stream.task.add_done_callback(lambda _: self._end_loan(stream))
        self._asked.append(stream)
        return stream

    def _end_loan(self, stream: PrefillStream) -> None:
        """Ends the loan: at once if the worker ended the stream itself, since it then ignores what arrives later; else
        after the time in which a worker notices a broken stream."""
        if self._borrower is stream:
            self._stream.end_loan(0.0 if stream.is_complete else lease_grace_s(self._worker.settings))

    def _start(self, first_block: int, peer: bytes, context: TraceContext | None) -> prefill_pb2.PrefillStart:
        request, worker = self._request, self._worker
        return prefill_pb2.PrefillStart(
            request_id=request.request_id,
            fingerprint=worker.fingerprint,
            prompt_token_ids=request.prompt_token_ids,
            sampling_params=request.sampling_params,
            cache_salt=request.cache_salt,
            retain=request.retain if request.HasField("retain") else None,
            tenant=request.tenant,
            priority=request.priority,
            targets=request.targets if request.HasField("targets") else None,
            age_ms=1000 * max(time.monotonic() - self._asked_time, 0.0),
            is_follow_up=request.is_follow_up,
            first_block=first_block,
            stop_block=self._stop_block,
            connector=worker.settings.connector,
            peer=peer,
            traceparent="" if context is None else context.traceparent,
            tracestate="" if context is None else context.state,
        )

    def _take_in(self, stream: PrefillStream, event: prefill_pb2.PrefillEvent) -> None:
        match event.WhichOneof("event"):
            case "accepted":
                if peer := stream.events.peer(event.accepted):
                    self._stream.send(m.AddPeer(peer))
            case "blocks_ready":
                published = self._published(stream, event.blocks_ready)
                self._go_on_with(stream)
                self._stream.send(published)
            case "wanted":
                self._lend_to(stream, event.wanted)
            case "first_token":
                self._take_in_first_token(stream, event.first_token)

    def _go_on_with(self, giver: PrefillStream) -> None:
        """`giver` was the first to give something, so the other stream, if there is one, is released."""
        if self._giver is giver:
            return
        self._giver = giver
        if self._hedge in self._asked:
            is_won = giver is self._hedge
            self._report.num_hedges_won += is_won
            if is_won:
                self.blamed += [stream.address for stream in self._asked if stream is not giver]
            metrics.worker_hedges_won.inc(is_won)
            extra = {"request_id": self._request.request_id, "address": giver.address, "is_won": is_won}
            log.info("one of two prefill workers gave something", extra=extra)
        for stream in self._asked:
            if stream is not giver:
                stream.release()
                self._note_end(stream.address)
                self._worker.finish_later(stream.end())
        self._asked = [giver]

    def _lend_to(self, stream: PrefillStream, wanted: prefill_pb2.BlocksWanted) -> None:
        command = stream.events.wanted(self._stream.engine_id, wanted)
        if self._borrower is None:
            self._borrower = stream
            self._stream.send(command)
        else:  # it was asked beside another one, which came first with this, too
            refused = range(command.first, command.stop)
            lent = prefill_pb2.BlocksReady(failed_indexes=refused, failure="another prefill worker has been lent them")
            stream.send(prefill_pb2.PrefillRequest(lent=lent))

    def _published(self, stream: PrefillStream, ready: prefill_pb2.BlocksReady) -> m.RemoteBlocksPublished:
        self.publish_ms = milliseconds(ready.publish_ms)
        return stream.events.published(self._stream.engine_id, ready)

    def _take_in_first_token(self, stream: PrefillStream, first: prefill_pb2.FirstToken) -> None:
        token = stream.events.first_token(first)
        published = [self._published(stream, first.blocks_ready)] if first.HasField("blocks_ready") else []
        self._go_on_with(stream)
        self._has_first_token = True
        self.queue_ms = milliseconds(first.queue_ms)
        self._report.prefill_worker = stream.address
        self._report.timings.prefill_ms = milliseconds(first.prefill_ms)
        self._report.timings.prefill_queue_ms = self.queue_ms
        self._report.num_blocks_lent = min(first.num_blocks_lent, self._num_lent)
        self._usage.cached_tokens = min(first.num_cached_tokens, len(self._request.prompt_token_ids))
        if token is None:
            num_part_tokens = self._stop_block * self._worker.ready.spec.block_size
            self._report.num_tail_tokens = len(self._request.prompt_token_ids) - num_part_tokens
            self.part_done_at = time.monotonic()
            self._stream.send(*published)
            return
        # The engine first: the token's way to the client takes longer than the blocks' way here.
        self._stream.send(*published, m.RemoteFirstToken(self._stream.engine_id, token))
        if not self._request.output_token_ids:  # else the client has it already, from an earlier decode worker
            self._stream.put(m.TokensGenerated(request_id=self._stream.engine_id, tokens=[token]))
