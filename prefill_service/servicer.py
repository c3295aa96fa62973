"""PrefillService: turns a prompt into KV blocks and one token, and holds the blocks while the stream lives.

The stream is the lease. Whatever ends it ends `Prefill` below, and with it the engine's hold on the blocks: at once
if the decode worker says that it reads no more (`release`). If a stream ends otherwise (a broken connection, a call
that was cancelled or failed), the decode worker may still believe that it lives, and would read other bytes from blocks
that are used again. So blocks that are read from this worker's memory are kept for `lease_grace_s` longer.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from typing import Any

import grpc

from common import metrics
from common.errors import BatonError, IncompatibleError, InvalidArgumentError
from common.grpc.options import LOSS_NOTICED_S
from common.grpc.streams import uncancelled
from common.sampling import SamplingParams
from common.tracing import RequestSpans, Span, Value
from engine import messages as m
from prefill_service.borrowing import Borrowing
from protos.baton.v1 import prefill_pb2, prefill_pb2_grpc
from protos.convert import token_to_proto
from worker import convert
from worker.engine_stream import EngineStream, RequestEvent
from worker.lease import lease_grace_s
from worker.request_spans import add_step, add_transfer, exported
from worker.shell import Work, Worker, check_hint, check_latency, check_names, ends_counted, error_from

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]


class PrefillServicer(prefill_pb2_grpc.PrefillServiceServicer):
    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    @property
    def _block_size(self) -> int:
        return self._worker.ready.spec.block_size

    # The stub knows servicers that are generators. This one writes, so that a cancelled call unwinds at once.
    async def Prefill(self, request_iterator: object, context: Context) -> None:  # type: ignore[override]  # noqa: ARG002, N802
        with ends_counted("prefill"):
            work = Work("prefill")
            async with self._worker.admit(work):
                start = await self._first_message(context)
                work.request_id = start.request_id
                params = self._check(start)
                with self._worker.engine.open(start.request_id, self._num_tokens(start)) as stream:
                    work.stream = stream
                    await self._run(start, params, stream, context)

    def _num_tokens(self, start: prefill_pb2.PrefillStart) -> int:
        """Of the prompt, or of the part that is asked for."""
        return start.stop_block * self._block_size or len(start.prompt_token_ids)

    async def _first_message(self, context: Context) -> prefill_pb2.PrefillStart:
        try:
            async with asyncio.timeout(LOSS_NOTICED_S):
                message = await uncancelled(context.read())
        except TimeoutError:
            raise InvalidArgumentError("start", f"did not come within {LOSS_NOTICED_S:g} s") from None
        if message is grpc.aio.EOF or not message.HasField("start"):
            raise InvalidArgumentError("start", "has to be the stream's first message")
        start: prefill_pb2.PrefillStart = message.start
        return start

    def _check(self, start: prefill_pb2.PrefillStart) -> SamplingParams:
        worker, num_tokens = self._worker, len(start.prompt_token_ids)
        worker.check_fingerprint(start.fingerprint)
        check_names(start.request_id, start.cache_salt)
        check_hint(convert.retain_of(start), start.tenant)
        worker.check_priority(start.priority)
        check_latency(convert.targets_of(start), start.age_ms)
        worker.check_tokens("prompt_token_ids", start.prompt_token_ids)
        num_blocks = -(-num_tokens // self._block_size)
        if start.first_block > num_blocks:
            raise InvalidArgumentError("first_block", f"{start.first_block} is behind the prompt's {num_blocks} blocks")
        if start.stop_block and not start.first_block < start.stop_block <= (num_tokens - 1) // self._block_size:
            reason = f"{start.stop_block} is not behind first_block and before the prompt's last token"
            raise InvalidArgumentError("stop_block", reason)
        ours = worker.settings.connector
        if start.connector and start.connector != ours:
            raise IncompatibleError(f"connector {start.connector!r} cannot read from {ours!r}")
        return convert.sampling_params(start.sampling_params, worker.limits, num_prompt_tokens=num_tokens)

    async def _run(
        self, start: prefill_pb2.PrefillStart, params: SamplingParams, stream: EngineStream, context: Context
    ) -> None:
        """Serves one prompt until the decode worker releases its blocks, or half-closes without a word."""
        worker, begin = self._worker, time.monotonic()
        spans = worker.traced(start.traceparent, start.tracestate)
        if spans is None or worker.spans is None:
            await self._serve(start, params, stream, context, begin, None)
            return
        attributes: dict[str, Value] = {
            "baton.worker": worker.address,
            "baton.request_id": start.request_id,
            "baton.prompt_tokens": len(start.prompt_token_ids),
            "baton.first_block": start.first_block,
        }

        def whole(error: str) -> list[Span]:
            name, end = "baton.v1.PrefillService/Prefill", time.monotonic()
            return spans.whole(name, begin, end, attributes, error=error)

        with exported(worker.spans, whole):
            await self._serve(start, params, stream, context, begin, spans)

    async def _serve(
        self,
        start: prefill_pb2.PrefillStart,
        params: SamplingParams,
        stream: EngineStream,
        context: Context,
        begin: float,
        spans: RequestSpans | None,
    ) -> None:
        worker = self._worker
        borrowing = Borrowing(stream, start.peer, worker.settings.transfer_timeout_s)
        num_tokens = self._num_tokens(start)
        stream.send(
            m.AddRequest(
                request_id=stream.engine_id,
                prompt_token_ids=start.prompt_token_ids[:num_tokens],
                # Nothing is sampled for a part: its grammar, say, is the decode worker's to compile.
                sampling_params=SamplingParams() if start.stop_block else params,
                mode=m.RequestMode.PREFILL,
                is_part=start.stop_block > 0,
                cache_salt=start.cache_salt,
                retain=convert.retain_of(start),
                tenant=start.tenant,
                priority=start.priority,
                targets=convert.targets_of(start),
                asked_time=begin - start.age_ms / 1000,
                is_follow_up=start.is_follow_up,
                first_block=start.first_block,
                num_lendable_blocks=start.first_block if start.peer and worker.ready.is_read_from_memory else 0,
                traceparent="" if spans is None else spans.own.traceparent,
            )
        )
        accepted = prefill_pb2.PrefillAccepted(worker_id=worker.worker_id, epoch=worker.epoch, peer=worker.ready.peer)
        await context.write(prefill_pb2.PrefillEvent(accepted=accepted))
        grace_s = lease_grace_s(worker.settings) if worker.ready.is_read_from_memory else 0.0
        relay = asyncio.create_task(_relay(stream, borrowing, context, begin, grace_s, spans, num_tokens))
        ended = asyncio.create_task(_read_to_end(borrowing, context))
        try:
            await asyncio.wait((relay, ended), return_when=asyncio.FIRST_COMPLETED)
            if relay.done():
                relay.result()  # only ever ends by raising
            if ended.done() and isinstance(error := ended.exception(), BatonError):
                raise error
        finally:
            relay.cancel()
            borrowing.end()
            if not ended.cancel() and ended.exception() is None and ended.result():
                stream.keep_s = 0.0


async def _relay(
    stream: EngineStream,
    borrowing: Borrowing,
    context: Context,
    begin: float,
    grace_s: float,
    spans: RequestSpans | None,
    num_prompt_tokens: int,
) -> None:
    """Passes on the engine's events until it is cancelled. Raises `BatonError` if the engine gives the request up."""
    events: deque[RequestEvent] = deque()
    while True:
        events = events or await stream.next_all()
        if any(isinstance(event, m.BlocksPublished) and event.blocks for event in events):
            stream.keep_s = grace_s  # from now on somebody may read them
        event = events.popleft()
        if spans is not None:
            _add_span(spans, event, begin)
        match event:
            case m.StepTraced():
                pass
            case m.LoanNeeded():
                await stream.deliver(context.write(borrowing.ask(event)))
            case m.BlocksPublished():
                message = prefill_pb2.PrefillEvent(blocks_ready=convert.blocks_ready(event))
                await stream.deliver(context.write(message))
            case m.TokensGenerated():
                metrics.worker_queue.observe(event.queue_s, None if spans is None else {"trace_id": spans.own.trace_id})
                metrics.worker_prompt_tokens.inc(num_prompt_tokens)
                metrics.worker_cached_tokens.inc(event.num_cached_tokens)
                first_token = _first_token(event, time.monotonic() - begin)
                first_token.num_blocks_lent = borrowing.num_read
                if events and isinstance(published := events[0], m.BlocksPublished):
                    # Together, which spares a message between two tokens.
                    first_token.blocks_ready.CopyFrom(convert.blocks_ready(published))
                    events.popleft()
                await stream.deliver(context.write(prefill_pb2.PrefillEvent(first_token=first_token)))
            case m.BlocksFetched():  # of the prompt's beginning; nobody was promised these blocks
                borrowing.count(event)
                metrics.worker_kv_blocks_moved.inc(len(event.indexes))
                metrics.worker_kv_blocks_lost.inc(len(event.failed_indexes))
                metrics.worker_kv_bytes_moved.inc(event.num_bytes)
            case m.RequestFailed():
                raise error_from(event)
            case _:
                raise TypeError(f"a prefill has no event {type(event).__name__}")


def _add_span(spans: RequestSpans, event: RequestEvent, begin: float) -> None:
    now = time.monotonic()
    match event:
        case m.StepTraced():
            add_step(spans, event)
        case m.BlocksPublished():
            published: dict[str, Value] = {"baton.num_blocks": len(event.blocks)}
            spans.add("publish", now - event.elapsed_s, now, published, error=event.failure)
        case m.BlocksFetched():
            add_transfer(spans, event, now)
        case m.TokensGenerated():
            spans.add("queue", begin, begin + event.queue_s)
            tokens: dict[str, Value] = {"baton.cached_tokens": event.num_cached_tokens}
            spans.add("prefill", begin + event.queue_s, now, tokens)


async def _read_to_end(borrowing: Borrowing, context: Context) -> bool:
    """Reads until the stream ends. Returns whether the decode worker released its blocks; a stream that just ends
    releases nothing, since broken streams end so, too.

    Acknowledgements need no action: the lease is the whole stream.
    """
    while (message := await uncancelled(context.read())) is not grpc.aio.EOF:
        if message.HasField("release"):
            return True
        if message.HasField("lent"):
            borrowing.take_in(message.lent)
    return False


def _first_token(event: m.TokensGenerated, elapsed_s: float) -> prefill_pb2.FirstToken:
    return prefill_pb2.FirstToken(
        token=token_to_proto(event.tokens[0]) if event.tokens else None,
        num_cached_tokens=event.num_cached_tokens,
        queue_ms=event.queue_s * 1000,
        prefill_ms=(elapsed_s - event.queue_s) * 1000,
    )


def add_service(worker: Worker, server: grpc.aio.Server) -> str:
    prefill_pb2_grpc.add_PrefillServiceServicer_to_server(PrefillServicer(worker), server)
    return prefill_pb2.DESCRIPTOR.services_by_name["PrefillService"].full_name
