"""One request's way to a prefill worker and back: opens the stream, passes on what it announces, closes it.

The stream is the lease on the prefill worker's blocks, so it stays open until the engine has what it needs, and not
longer. However the request ends, the leg says `release` and half-closes: a stream that just breaks off tells a
prefill worker nothing of what is still being read, so it would keep the blocks for a while. A worker that fails
before the first token is followed by the next in the list; when none is left, or the first token is known already,
the engine computes the rest itself.

A worker may ask for blocks that are here and that it lacks: it is lent them until it has ended the stream, or, if the
stream breaks off, for as long as it may take to notice. One request lends to one worker: another one that is asked
after a failure computes what it lacks.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence

import grpc

from common import metrics
from common.errors import TransferError, UnavailableError
from common.grpc_streams import MessageStream
from common.peers import milliseconds
from decode_service.prefill_events import PrefillEvents
from engine import messages as m
from protos.baton.v1 import decode_pb2, prefill_pb2, prefill_pb2_grpc, types_pb2
from worker import convert
from worker.engine_stream import EngineStream
from worker.lease import lease_grace_s
from worker.shell import Worker

log = logging.getLogger(__name__)

DEADLINE_SLACK_S = 0.05  # gRPC's clock and the event loop's may differ by so much
END_WAIT_S = 2.0  # for a prefill worker to end the stream; it does so at once


class PrefillLeg:
    """Its way is one task, from `start` to `end`; everything is called from the same event loop.

    `report` and `usage` are the request's: what the leg did is added to them.
    """

    def __init__(
        self,
        worker: Worker,
        request: decode_pb2.DecodeRequest,
        stream: EngineStream,
        report: types_pb2.RequestReport,
        usage: types_pb2.Usage,
    ) -> None:
        self.queue_ms = 0.0  # in the prefill worker that gave the first token
        self.publish_ms = 0.0  # of the last announcement
        self._report = report
        self._usage = usage
        self._failures: list[str] = []
        self._worker = worker
        self._request = request
        self._stream = stream
        self._outbox: asyncio.Queue[prefill_pb2.PrefillRequest | None] = asyncio.Queue()
        self._arrived: set[int] = set()
        self._has_first_token = False
        self._is_finished = False
        self._borrower: asyncio.Queue[prefill_pb2.PrefillRequest | None] | None = None  # outbox to who is lent blocks
        self._num_lent = 0
        self._task: asyncio.Task[None] | None = None

    def start(self, first_block: int, deadline: float | None) -> None:
        """Asks the workers in turn. `deadline` is in the event loop's time; None for none."""
        self._task = asyncio.create_task(self._run(first_block, deadline))
        self._task.add_done_callback(self._ended)

    @property
    def is_started(self) -> bool:
        return self._task is not None

    def acknowledge(self, indexes: Sequence[int]) -> None:
        self._arrived.update(indexes)
        received = prefill_pb2.BlocksReceived(indexes=indexes)
        self._outbox.put_nowait(prefill_pb2.PrefillRequest(received=received))

    def lend(self, published: m.BlocksPublished) -> None:
        """Tells the worker that asked for them of blocks that are readable here, or never will be."""
        if self._borrower is not None and not self._is_finished:
            self._num_lent += len(published.blocks)
            self._borrower.put_nowait(prefill_pb2.PrefillRequest(lent=convert.blocks_ready(published)))

    def finish(self) -> None:
        """Nothing more is needed: releases the blocks and half-closes the stream, which ends the lease.

        By now the engine reads none of them, or has been told that nobody waits for them.
        """
        if not self._is_finished:
            self._is_finished = True
            self._outbox.put_nowait(prefill_pb2.PrefillRequest(release=prefill_pb2.ReleaseBlocks()))
            self._outbox.put_nowait(None)

    async def end(self) -> None:
        """After `finish`: returns once the stream has ended. Cancels it if that takes too long."""
        if self._task is None:
            return
        done, _ = await asyncio.wait((self._task,), timeout=END_WAIT_S)
        if not done:
            extra = {"request_id": self._request.request_id}
            log.warning("a prefill worker does not end its stream, cancelling it", extra=extra)
            self._task.cancel()
            await asyncio.wait((self._task,))

    # ------------------------------------------------------------------------------------------ internals

    def _ended(self, task: asyncio.Task[None]) -> None:
        """A leg that ends by a defect leaves nobody waiting: the engine computes the rest."""
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
        for number, address in enumerate(self._request.prefill_addresses):
            if self._is_finished:
                return
            try:
                await self._run_on(address, self._first_missing(first_block), deadline)
                if self._is_finished:
                    return
                raise TransferError("ended its stream before all blocks were here")
            except (grpc.aio.AioRpcError, TransferError) as error:
                if self._is_finished or self._is_late(deadline):
                    return  # nobody waits any more: not the worker's failure
                self._note_failure(address, error)
                self._stream.send(m.PrefillLeaseEnded(self._stream.engine_id, self._failures[-1]))
            if self._has_first_token:
                break
            if number + 1 < len(self._request.prefill_addresses):
                self._report.num_retries += 1
        reason = self._failures[-1] if self._failures else "no prefill worker"
        self._stream.send(m.RemotePrefillFailed(self._stream.engine_id, reason))

    def _first_missing(self, first_block: int) -> int:
        while first_block in self._arrived:
            first_block += 1
        return first_block

    def _is_late(self, deadline: float | None) -> bool:
        return deadline is not None and asyncio.get_running_loop().time() >= deadline - DEADLINE_SLACK_S

    def _note_failure(self, address: str, error: grpc.aio.AioRpcError | TransferError) -> None:
        code = error.code().name if isinstance(error, grpc.aio.AioRpcError) else "OK"
        words = f"{code}: {error.details()}" if isinstance(error, grpc.aio.AioRpcError) else str(error)
        metrics.worker_prefill_failures.labels(code).inc()
        self._failures.append(f"prefill worker {address}: {words}")
        log.warning(
            "prefill worker failed", extra={"request_id": self._request.request_id, "address": address, "reason": words}
        )

    async def _run_on(self, address: str, first_block: int, deadline: float | None) -> None:
        """One stream to one worker, from start to end."""
        outbox = self._outbox = asyncio.Queue()
        ready = self._worker.ready
        lends = self._worker.settings.lend_blocks and ready.is_read_from_memory and self._borrower is None
        num_lendable = first_block if lends else 0
        events = PrefillEvents(
            first_block=first_block,
            num_blocks=-(-len(self._request.prompt_token_ids) // ready.spec.block_size),
            vocab_size=ready.vocab_size,
            num_lendable=num_lendable,
        )
        start = self._start(first_block, ready.peer if num_lendable else b"")
        outbox.put_nowait(prefill_pb2.PrefillRequest(start=start))
        lease_s = lease_grace_s(self._worker.settings)  # of what is lent, after the stream
        # A request whose deadline passes is ended by its own call. This later deadline is for the case that it is not.
        timeout = None if deadline is None else max(deadline - asyncio.get_running_loop().time(), 0.0) + END_WAIT_S
        with self._worker.channels.calling(address) as channel:
            call = prefill_pb2_grpc.PrefillServiceStub(channel).Prefill(self._messages(outbox), timeout=timeout)
            try:
                async with contextlib.aclosing(MessageStream(call, prefill_pb2.PrefillEvent)) as received:
                    async for event in received:
                        if not self._is_finished:
                            self._take_in(address, events, event)
                lease_s = 0.0  # the worker ended it, and believes nothing that arrives after that
            finally:
                outbox.put_nowait(None)  # the call's own task still waits for a message
                if self._borrower is outbox:
                    self._stream.end_loan(lease_s)

    async def _messages(
        self, outbox: asyncio.Queue[prefill_pb2.PrefillRequest | None]
    ) -> AsyncIterator[prefill_pb2.PrefillRequest]:
        """Until None. Releasing acknowledges the last blocks as well, so then they need no message."""
        while (message := await outbox.get()) is not None:
            if not (self._is_finished and message.HasField("received")):
                yield message

    def _start(self, first_block: int, peer: bytes) -> prefill_pb2.PrefillStart:
        request, worker = self._request, self._worker
        return prefill_pb2.PrefillStart(
            request_id=request.request_id,
            fingerprint=worker.fingerprint,
            prompt_token_ids=request.prompt_token_ids,
            sampling_params=request.sampling_params,
            cache_salt=request.cache_salt,
            priority=request.priority,
            first_block=first_block,
            connector=worker.settings.connector,
            peer=peer,
        )

    def _take_in(self, address: str, events: PrefillEvents, event: prefill_pb2.PrefillEvent) -> None:
        match event.WhichOneof("event"):
            case "accepted":
                if peer := events.peer(event.accepted):
                    self._stream.send(m.AddPeer(peer))
            case "blocks_ready":
                self._stream.send(self._announced(events, event.blocks_ready))
            case "wanted":
                command = events.wanted(self._stream.engine_id, event.wanted)
                self._borrower = self._outbox
                self._stream.send(command)
            case "first_token":
                self._take_in_first_token(address, events, event.first_token)

    def _announced(self, events: PrefillEvents, ready: prefill_pb2.BlocksReady) -> m.BlocksAnnounced:
        self.publish_ms = milliseconds(ready.publish_ms)
        return events.announced(self._stream.engine_id, ready)

    def _take_in_first_token(self, address: str, events: PrefillEvents, first: prefill_pb2.FirstToken) -> None:
        token = events.first_token(first)
        announced = [self._announced(events, first.blocks_ready)] if first.HasField("blocks_ready") else []
        self._has_first_token = True
        self.queue_ms = milliseconds(first.queue_ms)
        self._report.prefill_worker = address
        self._report.timings.prefill_ms = milliseconds(first.prefill_ms)
        self._report.num_blocks_lent = min(first.num_blocks_lent, self._num_lent)
        self._usage.cached_tokens = min(first.num_cached_tokens, len(self._request.prompt_token_ids))
        # The engine first: the token's way to the client takes longer than the blocks' way here.
        self._stream.send(*announced, m.RemoteFirstToken(self._stream.engine_id, token))
        if not self._request.output_token_ids:  # else the client has it already, from an earlier decode worker
            self._stream.put(m.TokensGenerated(request_id=self._stream.engine_id, tokens=[token]))
