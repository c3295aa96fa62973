"""The answer to one request: tokens from the fleet become text, and what was done for it is reported."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, aclosing
from dataclasses import replace
from functools import partial

from common import metrics
from common.beam_search import Beam
from common.errors import BatonError
from common.grpc.options import DEADLINE_SLACK_S
from common.types import FinishReason, SampledToken
from protos.baton.v1 import types_pb2
from router.limits.admission import Admission
from router.running.beams import search
from router.running.dispatch import Dispatcher
from router.running.request import GenerationRequest, NewTokens, Output, Progress
from text.answer_reader import AnswerReader
from text.answer_text import NewText

log = logging.getLogger(__name__)


class Generation:
    """Shared by both interfaces of a router."""

    def __init__(self, dispatcher: Dispatcher, admission: Admission) -> None:
        self._dispatcher = dispatcher
        self._admission = admission

    async def generate(self, request: GenerationRequest, index: int = 0) -> AsyncGenerator[tuple[int, Output], None]:
        """Pieces of the answer, each with its `index` among the answers to one body. Inside `charged`. Closing the
        iterator, or cancelling its task, ends the request on every worker."""
        progress = Progress()
        with _UnfinishedLogged(request, progress):
            async with self._turn(request):
                answer = _OutputMaker(request, progress)
                async with aclosing(self._dispatcher.run(request, progress)) as run:
                    async for new in run:
                        for output in answer.outputs(new):
                            self._admission.answered(request.client, len(output.tokens))
                            yield index, output
                            if output.finish_reason is not None:
                                return

    async def beams(self, requests: Sequence[GenerationRequest]) -> list[Output]:
        """Whole answers, best first, one for each of `requests`, whose `beams` are set. Inside `charged`."""
        first, progress = requests[0], Progress()
        with _UnfinishedLogged(first, progress):
            async with self._turn(first):
                found = await search(self._dispatcher, first, progress, partial(self._admission.answered, first.client))
        for request in requests:
            request.charge.worker_was_asked = True
        return [_whole(request, beam, progress) for request, beam in zip(requests, found, strict=True)]

    def charged(self, requests: Sequence[GenerationRequest], field: str = "") -> AbstractContextManager[None]:
        """Use it around `generate` of each answer that one body asks for. `field` says how many there are. See
        `Admission.charged`."""
        charges = [one.charge for one in requests]
        return self._admission.charged(requests[0].client, charges, num_answers=len(requests), field=field)

    def _turn(self, request: GenerationRequest) -> AbstractAsyncContextManager[None]:
        """See `Admission.turn`."""
        num_answers = 1 if request.beams is None else request.beams.beam_width
        cost = len(request.prompt_token_ids) + num_answers * request.sampling_params.max_tokens
        return self._admission.turn(
            request.client, cost, request.deadline, priority=request.priority, places=num_answers
        )


class _OutputMaker:
    """Makes pieces of one answer of what comes from the fleet, until one has a `finish_reason`."""

    def __init__(self, request: GenerationRequest, progress: Progress) -> None:
        params, reading = request.sampling_params, request.reading
        self._request = request
        self._progress = progress
        self._reader = AnswerReader(request.model.tokenizer, request.prompt_token_ids, params, reading)
        self._text = self._reader.text
        self._num_reasoning_tokens = 0

    def outputs(self, new: NewTokens) -> Iterable[Output]:
        """One output for all of `new`, or one for each token if tokens with logprobs have to be assigned to parts."""
        if self._reader.parser is None or self._request.sampling_params.logprobs is None or len(new.tokens) < 2:
            return (self.output(new),)
        return self._one_by_one(new)

    def _one_by_one(self, new: NewTokens) -> Iterator[Output]:
        for token in new.tokens[:-1]:
            yield self.output(replace(new, tokens=[token], finish_reason=None, stop_token_id=None))
            new = replace(new, prompt_logprobs=())
        yield self.output(replace(new, tokens=new.tokens[-1:]))

    def output(self, new: NewTokens) -> Output:
        if self._reader.parser is not None:
            return self._in_parts(new)
        if new.finish_reason is None and not self._text.may_stop:  # most of an answer
            return Output(text=self._text.more(new.tokens), tokens=new.tokens, prompt_logprobs=new.prompt_logprobs)
        piece = self._text.add(new.tokens, new.finish_reason, new.stop_token_id)
        if piece.finish_reason is None:
            return Output(text=piece.text, tokens=new.tokens, prompt_logprobs=new.prompt_logprobs)
        if piece.num_tokens < len(new.tokens):
            new = replace(new, tokens=new.tokens[: piece.num_tokens])
        return self._last(new, piece)

    def _in_parts(self, new: NewTokens) -> Output:
        """Reasoning and calls are apart from the text. The last output, if the answer may not have what follows."""
        read = self._reader.add(new.tokens, new.finish_reason, new.stop_token_id)
        if read.num_tokens < len(new.tokens):
            new = replace(new, tokens=new.tokens[: read.num_tokens])
        self._num_reasoning_tokens += read.num_reasoning_tokens
        if read.finish_reason is None:
            output = Output(text="", tokens=new.tokens, prompt_logprobs=new.prompt_logprobs)
        else:
            output = self._last(new, NewText("", len(new.tokens), read.finish_reason, read.stop_reason))
            output.is_cut = read.is_cut
        pieces = read.pieces
        output.text, output.reasoning = pieces.content, pieces.reasoning
        output.tool_calls, output.parts = pieces.calls, pieces.parts
        output.num_reasoning_tokens = read.num_reasoning_tokens
        return output

    def _last(self, new: NewTokens, end: NewText) -> Output:
        _complete(self._request, self._progress, self._text.num_tokens, self._num_reasoning_tokens)
        _observe(self._request, self._progress)
        return Output(
            text=end.text,
            tokens=new.tokens,
            prompt_logprobs=new.prompt_logprobs,
            finish_reason=end.finish_reason,
            stop_reason=end.stop_reason,
            report=self._progress.report,
            usage=self._progress.usage,
        )


def _whole(request: GenerationRequest, beam: Beam, progress: Progress) -> Output:
    """The output for one sequence of a beam search that took `progress`."""
    own = replace(progress, report=types_pb2.RequestReport(), usage=types_pb2.Usage())
    own.report.CopyFrom(progress.report)
    own.usage.CopyFrom(progress.usage)
    tokens = [SampledToken(token_id) for token_id in beam.token_ids]
    stop_token_id = beam.token_ids[-1] if beam.finish_reason is FinishReason.STOP else None
    output = _OutputMaker(request, own).output(NewTokens(tokens, beam.finish_reason, stop_token_id))
    return replace(output, logprob=beam.logprob)


class _UnfinishedLogged:
    __slots__ = ("_progress", "_request")

    def __init__(self, request: GenerationRequest, progress: Progress) -> None:
        self._request = request
        self._progress = progress

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, BatonError):
            _log_unfinished("failed", self._request, self._progress, f"{error.grpc_code}: {error.message}")
        elif isinstance(error, asyncio.CancelledError | GeneratorExit):
            # gRPC tells a deadline like a cancel.
            is_late = time.monotonic() >= self._request.deadline - DEADLINE_SLACK_S
            reason = "its deadline has passed" if is_late else "by its client"
            _log_unfinished("cancelled", self._request, self._progress, reason)


def _log_unfinished(how: str, request: GenerationRequest, progress: Progress, reason: str) -> None:
    extra = {
        "request_id": request.request_id,
        "reason": reason,
        "decode_worker": progress.report.decode_worker,
        "output_tokens": progress.num_output_tokens,
    }
    log.info(how, extra=extra)


def _complete(request: GenerationRequest, progress: Progress, num_tokens: int, num_reasoning_tokens: int) -> None:
    """Adds to the report what only the router knows."""
    now = time.monotonic()
    first = now if progress.first_token_at is None else progress.first_token_at
    last = now if progress.last_token_at is None else progress.last_token_at
    rest_s = last - first
    timings, usage = progress.report.timings, progress.usage
    progress.report.notes[:] = request.notes
    timings.ttft_ms = 1000 * (first - request.arrived_at)
    timings.total_ms = 1000 * (last - request.arrived_at)
    timings.tokens_per_second = (num_tokens - 1) / rest_s if num_tokens > 1 and rest_s > 0 else 0.0
    usage.prompt_tokens = len(request.prompt_token_ids)
    usage.completion_tokens = num_tokens
    usage.reasoning_tokens = num_reasoning_tokens


def _observe(request: GenerationRequest, progress: Progress) -> None:
    report, timings, usage = progress.report, progress.report.timings, progress.usage
    metrics.router_prompt_tokens.observe(usage.prompt_tokens)
    metrics.router_output_tokens.observe(usage.completion_tokens)
    metrics.router_cached_tokens.inc(usage.cached_tokens)
    metrics.router_ttft.observe(timings.ttft_ms / 1000)
    metrics.router_e2e.observe(timings.total_ms / 1000)
    if usage.completion_tokens > 1:
        metrics.router_tpot.observe((timings.total_ms - timings.ttft_ms) / 1000 / (usage.completion_tokens - 1))
    if report.fallback_reason:
        metrics.router_fallbacks.inc()
    if not log.isEnabledFor(logging.INFO):
        return
    extra: dict[str, object] = {
        "request_id": request.request_id,
        "decode_worker": report.decode_worker,
        "prefill_worker": report.prefill_worker,
        "prompt_tokens": usage.prompt_tokens,
        "output_tokens": usage.completion_tokens,
        "ttft_ms": round(timings.ttft_ms, 1),
        "total_ms": round(timings.total_ms, 1),
    }
    if request.client.name:
        extra["client"] = request.client.name
    if report.fallback_reason:
        extra["fallback_reason"] = report.fallback_reason
    log.info("answered", extra=extra)
