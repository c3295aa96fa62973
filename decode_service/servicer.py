"""DecodeService: runs one request to its end on this worker.

Each request is a task of its own, whether its router asked for it in a stream of many (`worker.many_calls`) or alone.

If the request names prefill workers, the engine waits for their KV (`WAITING_FOR_REMOTE_KV`) while `PrefillLeg` keeps
the stream that is the lease. If it names none, or none of them can serve it, the engine computes the prompt itself.
"""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc

from common import metrics
from common.errors import InvalidArgumentError
from common.sampling import SamplingParams
from common.tracing import RequestSpans, Span, Value
from decode_service.prefill_leg import PrefillLeg
from engine import messages as m
from protos.baton.v1 import decode_pb2, decode_pb2_grpc, types_pb2
from protos.convert import finish_reason_to_proto, token_to_proto
from worker import convert
from worker.engine_stream import EngineStream, HandoverDue
from worker.many_calls import Caller, ManyCalls, OneCall
from worker.port import max_calls
from worker.request_spans import add_step, add_transfer, exported
from worker.shell import Work, Worker, check_hint, check_latency, check_names, ends_counted, error_from

Context = grpc.aio.ServicerContext[Any, Any]

MAX_PREFILL_ADDRESSES = 64
NUM_FIRST_SENDS = 2  # events with tokens that bring a report
DRAFTS_TOLD_EVERY = 16  # events with tokens


class DecodeServicer(decode_pb2_grpc.DecodeServiceServicer):
    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._many = ManyCalls(self._decode, max_calls(worker.settings))

    # The stub knows servicers that are generators. These write, so that a cancelled call unwinds at once.
    async def DecodeMany(self, request_iterator: object, context: Context) -> None:  # type: ignore[override]  # noqa: ARG002, N802
        await self._many.serve(context)

    async def Decode(self, request: decode_pb2.DecodeRequest, context: Context) -> None:  # type: ignore[override]  # noqa: N802
        await context.send_initial_metadata(())  # else gRPC could not end a call whose first write is given up
        await self._decode(request, OneCall(context))

    async def _decode(self, request: decode_pb2.DecodeRequest, caller: Caller) -> None:
        metrics.worker_decode_calls.labels("Decode" if isinstance(caller, OneCall) else "DecodeMany").inc()
        with ends_counted("decode"):
            work = Work("decode", request.request_id)
            async with self._worker.admit(work):
                params = self._check(request)
                num_tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
                with self._worker.engine.open(request.request_id, num_tokens) as stream:
                    work.stream = stream
                    await DecodeRun(self._worker, request, params, stream, caller).run()

    def _check(self, request: decode_pb2.DecodeRequest) -> SamplingParams:
        worker, num_outputs = self._worker, len(request.output_token_ids)
        worker.check_fingerprint(request.fingerprint)
        check_names(request.request_id, request.cache_salt)
        check_hint(convert.retain_of(request), request.tenant)
        worker.check_priority(request.priority)
        check_latency(convert.targets_of(request), request.age_ms)
        worker.check_tokens("prompt_token_ids", request.prompt_token_ids)
        if num_outputs:
            worker.check_tokens("output_token_ids", [*request.prompt_token_ids, *request.output_token_ids])
        if len(request.prefill_addresses) > MAX_PREFILL_ADDRESSES:
            raise InvalidArgumentError("prefill_addresses", f"must have at most {MAX_PREFILL_ADDRESSES} entries")
        if not 0 <= request.hedge_after_s < math.inf:
            raise InvalidArgumentError("hedge_after_s", "must be a number of seconds, 0 or more")
        params = convert.sampling_params(
            request.sampling_params, worker.limits, num_prompt_tokens=len(request.prompt_token_ids)
        )
        if params.max_tokens <= num_outputs:
            raise InvalidArgumentError("sampling_params.max_tokens", "leaves no token to generate")
        return params


@dataclass(slots=True)
class _Marks:
    """When things happened, in seconds of the monotonic clock; None until they have."""

    start: float
    first_token: float | None = None
    kv_complete: float | None = None
    second_token: float | None = None
    queue_s: float = 0.0
    last_fetch_s: float = 0.0  # what the connector took for the blocks that arrived last

    def token(self, now: float) -> None:
        if self.first_token is None:
            self.first_token = now
        elif self.second_token is None:
            self.second_token = now


class DecodeRun:
    """One request on this worker, from admission to its last token."""

    def __init__(
        self,
        worker: Worker,
        request: decode_pb2.DecodeRequest,
        params: SamplingParams,
        stream: EngineStream,
        caller: Caller,
    ) -> None:
        self._worker = worker
        self._request = request
        self._params = params
        self._stream = stream
        self._caller = caller
        self._report = types_pb2.RequestReport()
        self._usage = types_pb2.Usage()
        self._spans = worker.traced(request.traceparent, request.tracestate)
        self._marks = _Marks(time.monotonic())
        self._asked_time = self._marks.start - request.age_ms / 1000  # when it came to its router
        self._leg = PrefillLeg(worker, request, stream, self._report, self._usage, self._asked_time, self._spans)
        self._num_sends = 0
        self._num_tokens = 0  # of the answer, that came from this worker's engine

    async def run(self) -> None:
        if self._spans is None or self._worker.spans is None:
            await self._run()
            return
        with exported(self._worker.spans, partial(self._whole, self._spans)):
            await self._run()

    async def _run(self) -> None:
        request = self._request
        # Logprobs of the prompt come from computing it, and only the decode worker is asked for them.
        computes_prompt = self._params.prompt_logprobs is not None and not request.output_token_ids
        is_remote = bool(request.prefill_addresses) and not computes_prompt
        self._stream.send(
            m.AddRequest(
                request_id=self._stream.engine_id,
                prompt_token_ids=list(request.prompt_token_ids),
                output_token_ids=list(request.output_token_ids),
                sampling_params=self._params,
                mode=m.RequestMode.REMOTE if is_remote else m.RequestMode.LOCAL,
                cache_salt=request.cache_salt,
                retain=convert.retain_of(request),
                tenant=request.tenant,
                priority=request.priority,
                targets=convert.targets_of(request),
                asked_time=self._asked_time,
                is_follow_up=request.is_follow_up,
                min_remote_tokens=request.min_remote_tokens,
                split_at=request.split_at,
                traceparent="" if self._spans is None else self._spans.own.traceparent,
            )
        )
        self._stream.pass_on = self._pass_on
        try:
            while not await self._take_in(await self._stream.next()):
                pass
        finally:
            self._stream.pass_on = None
            self._count_tokens()
            if self._leg.is_started:
                self._stream.release()  # before the lease ends: nothing that arrives after that is to be trusted
                self._leg.finish()
                self._worker.finish_later(self._leg.end())

    async def _take_in(self, event: object) -> bool:
        """Acts on one event. Returns whether it was the last one."""
        match event:
            case m.RemotePrefillNeeded(_, first_block, stop_block):
                self._marks.queue_s = time.monotonic() - self._marks.start
                self._leg.start(first_block, stop_block, self._deadline())
            case m.BlocksFetched(_, indexes, failed_indexes, _, num_bytes, elapsed_s):
                self._marks.last_fetch_s = elapsed_s
                if self._spans is not None:
                    add_transfer(self._spans, event, time.monotonic())
                self._report.num_blocks_moved += len(indexes)
                self._report.num_bytes_moved += num_bytes
                metrics.worker_kv_blocks_moved.inc(len(indexes))
                metrics.worker_kv_blocks_lost.inc(len(failed_indexes))
                metrics.worker_kv_bytes_moved.inc(num_bytes)
                self._leg.acknowledge(indexes)
            case m.BlocksPublished():
                self._leg.lend(event)
            case m.PrefillReceived(_, received_time):
                self._marks.kv_complete = received_time
                self._leg.finish()
            case m.StepTraced():
                if self._spans is not None:
                    add_step(self._spans, event, len(self._request.prompt_token_ids))
            case m.PromptScored(_, scores):
                scored = decode_pb2.DecodeEvent(prompt_logprobs=[token_to_proto(one) for one in scores])
                await self._stream.deliver(self._caller.write(scored))
            case m.TokensGenerated():
                if self._pass_on(event):
                    return False
                await self._send(event)
                if event.finish_reason is None:
                    return False
                self._count()
                return True
            case HandoverDue():
                await self._stream.deliver(self._caller.write(decode_pb2.DecodeEvent(offers_handover=True)))
            case m.RequestFailed():
                raise error_from(event)
            case _:
                raise TypeError(f"a decode has no event {type(event).__name__}")
        return False

    async def _send(self, event: m.TokensGenerated) -> None:
        if event.tokens:
            self._marks.token(time.monotonic())
            self._num_tokens += len(event.tokens)
        if not self._leg.is_started:
            self._marks.queue_s = event.queue_s
        message = decode_pb2.DecodeEvent(
            tokens=[token_to_proto(token) for token in event.tokens],
            finish_reason=finish_reason_to_proto(event.finish_reason),
            stop_token_id=event.stop_token_id,
        )
        if self._is_news(event):
            self._usage.cached_tokens = max(self._usage.cached_tokens, event.num_cached_tokens)
            message.report.CopyFrom(self._completed(event))
            message.usage.CopyFrom(self._usage)
            message.blamed_prefill_addresses.extend(self._leg.blamed)
            message.refused_prefill_addresses.extend(self._leg.refused)
        await self._stream.deliver(self._caller.write(message))

    def _pass_on(self, event: m.TokensGenerated) -> bool:
        """Sends the event's tokens alone if nothing else has to be said of them, as with most events of an answer.
        Returns whether it did."""
        is_begun = self._num_sends >= NUM_FIRST_SENDS and self._marks.second_token is not None
        if not is_begun or event.finish_reason is not None:
            return False
        if self._is_told_of_drafts(event, self._num_sends + 1):
            return False
        tokens = event.tokens
        if any(token.logprob is not None or token.top_logprobs for token in tokens):
            return False
        if not self._caller.take_tokens([token.token_id for token in tokens]):
            return False
        self._num_sends += 1
        self._num_tokens += len(tokens)
        return True

    def _count(self) -> None:
        """After the last token."""
        marks = self._marks
        exemplar = None if self._spans is None else {"trace_id": self._spans.own.trace_id}
        place = "split" if self._report.num_tail_tokens else "remote" if self._leg.is_started else "here"
        metrics.worker_prompts.labels(place).inc()
        metrics.worker_queue.observe(marks.queue_s, exemplar)
        if marks.kv_complete is not None and (begin := self._handoff_begin) is not None:
            metrics.worker_handoff.observe(max(marks.kv_complete - begin, 0.0), exemplar)

    @property
    def _handoff_begin(self) -> float | None:
        """When all that a prefill worker was asked for was computed: a split prompt's part, or the first token."""
        return self._marks.first_token if self._leg.part_done_at is None else self._leg.part_done_at

    def _count_tokens(self) -> None:
        """However the request ends: a router that finds a stop string cancels it."""
        if self._marks.first_token is not None:
            metrics.worker_prompt_tokens.inc(len(self._request.prompt_token_ids))
            metrics.worker_cached_tokens.inc(self._usage.cached_tokens)
            metrics.worker_output_tokens.inc(self._num_tokens)

    def _is_news(self, event: m.TokensGenerated) -> bool:
        """Whether the report differs from the last one sent, so that this event has to bring it. A router that ends an
        answer itself, at a stop string, has the report by then; its counts of drafts may be some tokens old."""
        self._num_sends += 1
        is_due = self._num_sends <= NUM_FIRST_SENDS or self._is_told_of_drafts(event, self._num_sends)
        return is_due or event.finish_reason is not None

    def _is_told_of_drafts(self, event: m.TokensGenerated, num_sends: int) -> bool:
        return event.num_drafted_tokens > 0 and num_sends % DRAFTS_TOLD_EVERY == 0

    def _completed(self, event: m.TokensGenerated) -> types_pb2.RequestReport:
        """Returns the report with everything that is known by now."""
        marks, report, timings = self._marks, self._report, self._report.timings
        first = marks.first_token or marks.start  # resumed requests that finish at once have no token of their own
        kv_complete = max(marks.kv_complete or first, first)
        report.fallback_reason = event.fallback_reason
        report.num_preemptions = event.num_preemptions
        report.num_drafted_tokens = event.num_drafted_tokens
        report.num_accepted_tokens = event.num_accepted_tokens
        timings.queue_ms = marks.queue_s * 1000 + self._leg.queue_ms
        timings.first_decode_ms = (marks.second_token - kv_complete) * 1000 if marks.second_token else 0.0
        if report.prefill_worker:
            if (part_done_at := self._leg.part_done_at) is not None:
                kv_complete = max(marks.kv_complete or part_done_at, part_done_at)
                timings.tail_ms = max(first - kv_complete, 0.0) * 1000
            timings.handoff_ms = (kv_complete - (self._handoff_begin or first)) * 1000
            timings.transfer_ms = min(self._leg.publish_ms + marks.last_fetch_s * 1000, timings.handoff_ms)
        else:
            timings.prefill_ms = max(first - marks.start - marks.queue_s, 0.0) * 1000
        return report

    def _whole(self, spans: RequestSpans, error: str) -> list[Span]:
        marks, now, report = self._marks, time.monotonic(), self._report
        self._leg.add_spans(now)
        spans.add("queue", marks.start, marks.start + marks.queue_s)
        events = []
        if marks.first_token is not None:
            events.append(("first token", marks.first_token))
            begin = self._handoff_begin or marks.first_token
            kv_complete = max(marks.kv_complete or begin, begin)
            if report.prefill_worker:
                moved = {"baton.num_blocks": report.num_blocks_moved, "baton.num_bytes": report.num_bytes_moved}
                spans.add("handoff", begin, kv_complete, moved)
            if report.num_tail_tokens:
                spans.add("tail", kv_complete, marks.first_token, {"baton.tail_tokens": report.num_tail_tokens})
            if marks.second_token is not None:
                spans.add("first decode", max(kv_complete, marks.first_token), marks.second_token)
                spans.add("stream", marks.second_token, now)
        attributes: dict[str, Value] = {
            "baton.worker": self._worker.address,
            "baton.request_id": self._request.request_id,
            "baton.prompt_tokens": len(self._request.prompt_token_ids),
            "baton.cached_tokens": self._usage.cached_tokens,
            "baton.num_preemptions": report.num_preemptions,
            "baton.num_hedges": report.num_hedges,
            "baton.fallback_reason": report.fallback_reason,
        }
        return spans.whole("baton.v1.DecodeService/Decode", marks.start, now, attributes, events, error)

    def _deadline(self) -> float | None:
        """The request's own deadline, in the event loop's time."""
        remaining = self._caller.time_remaining()
        return None if remaining is None else asyncio.get_running_loop().time() + remaining


def add_service(worker: Worker, server: grpc.aio.Server) -> str:
    decode_pb2_grpc.add_DecodeServiceServicer_to_server(DecodeServicer(worker), server)
    return decode_pb2.DESCRIPTOR.services_by_name["DecodeService"].full_name
