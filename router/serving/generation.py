"""The answer to one request: tokens from the fleet become text, and what was done for it is reported."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, aclosing
from dataclasses import replace
from functools import partial

from common import metrics
from common.beam_search import Beam
from common.errors import AbortedError
from common.types import FinishReason, SampledToken
from protos.baton.v1 import types_pb2
from router.limits.admission import Admission
from router.policy.base import RoutingDecision
from router.running.beams import search
from router.running.dispatch import Dispatcher
from router.running.request import GenerationRequest, NewTokens, Output, Progress
from router.running.routes import Route
from router.serving.choices import Hold, Outputs, side_by_side
from router.serving.endings import Endings, complete
from text.answer_reader import AnswerReader, NewText


class Generation:
    """Shared by both interfaces of a router."""

    def __init__(self, dispatcher: Dispatcher, admission: Admission, endings: Endings | None = None) -> None:
        self._dispatcher = dispatcher
        self._admission = admission
        self._endings = endings or Endings()

    def outputs(self, requests: Sequence[GenerationRequest], hold: Hold) -> Outputs:
        """Pieces of all answers to one body. See `side_by_side`. Inside `charged`."""
        if len(requests) == 1 and requests[0].beams is None:
            return self.generate(requests[0])  # as it is: a generator between would cost each piece 0.1 µs
        return side_by_side(self, requests, hold)

    async def generate(self, request: GenerationRequest, index: int = 0) -> AsyncGenerator[tuple[int, Output], None]:
        """Pieces of the answer, each with its `index` among the answers to one body. Inside `charged`. Closing the
        iterator, or cancelling its task, ends the request on every worker."""
        progress = Progress(queued_at=time.monotonic())
        with self._endings.watching(request, progress):
            async with self._turn(request) if request.room is None else contextlib.nullcontext():
                progress.turn_at = time.monotonic()
                answer, texts = _OutputMaker(request, progress), progress.texts
                tokens = self._dispatcher.run if request.room is None else self._in_turns
                async with aclosing(tokens(request, progress)) as run:
                    async for new in run:
                        for output in answer.outputs(new):
                            self._admission.answered(request.client, len(output.tokens))
                            if texts is not None:
                                texts.append(output.text)
                            if output.finish_reason is not None:
                                self._endings.answered(request, progress, output.finish_reason)
                            progress.is_with_reader = True
                            yield index, output
                            progress.is_with_reader = False
                            if output.finish_reason is not None:
                                return
                            if progress.abort_reason:
                                raise AbortedError(progress.abort_reason)

    async def choose(self, request: GenerationRequest) -> tuple[Route, RoutingDecision]:
        """See `Dispatcher.choose`."""
        return await self._dispatcher.choose(request)

    async def _in_turns(self, request: GenerationRequest, progress: Progress) -> AsyncGenerator[NewTokens, None]:
        """`Dispatcher.run` for a request of a batch: only while there is room, and from where it stopped."""
        assert request.room is not None  # noqa: S101 - the caller has looked
        sent: list[int] = []
        while True:
            waits_at = time.monotonic()
            async with request.room.place() as place:
                # Its deadline is for the time in which workers may have it.
                request = replace(request, deadline=request.deadline + time.monotonic() - waits_at)
                async with self._turn(request):
                    arrived: asyncio.Queue[NewTokens | None] = asyncio.Queue()
                    asking = asyncio.create_task(self._ask(request, progress, sent, arrived.put_nowait))
                    asking.add_done_callback(_puts_end(arrived))
                    place.on_way(asking.cancel)
                    try:
                        while (new := await arrived.get()) is not None:
                            yield new
                            if new.finish_reason is not None:
                                return
                    finally:
                        asking.cancel()
                        await asyncio.gather(asking, return_exceptions=True)
                    if not (asking.cancelled() and place.makes_way):
                        asking.result()
            progress.num_pauses += 1
            progress.lost("made way for others", time.monotonic())
            metrics.router_batch_pauses.inc()

    async def _ask(
        self, request: GenerationRequest, progress: Progress, sent: list[int], put: Callable[[NewTokens], None]
    ) -> None:
        async with aclosing(self._dispatcher.run(request, progress, sent)) as run:
            async for new in run:
                put(new)

    async def beams(self, requests: Sequence[GenerationRequest]) -> list[Output]:
        """Whole answers, best first, one for each of `requests`, whose `beams` are set. Inside `charged`."""
        first, progress = requests[0], Progress(queued_at=time.monotonic())
        with self._endings.watching(first, progress):
            async with self._turn(first):
                progress.turn_at = time.monotonic()
                found = await search(self._dispatcher, first, progress, partial(self._admission.answered, first.client))
        for request in requests:
            request.charge.worker_was_asked = True
        outputs = []
        for request, beam in zip(requests, found, strict=True):
            outputs.append(self._whole(request, beam, progress))
            progress.attempts = []  # told with the first
        return outputs

    def _whole(self, request: GenerationRequest, beam: Beam, progress: Progress) -> Output:
        """The output for one sequence of a beam search that took `progress`."""
        own = replace(progress, report=types_pb2.RequestReport(), usage=types_pb2.Usage())
        own.report.CopyFrom(progress.report)
        own.usage.CopyFrom(progress.usage)
        tokens = [SampledToken(token_id) for token_id in beam.token_ids]
        stop_token_id = beam.token_ids[-1] if beam.finish_reason is FinishReason.STOP else None
        output = _OutputMaker(request, own).output(NewTokens(tokens, beam.finish_reason, stop_token_id))
        if own.texts is not None:
            own.texts = [output.text]
        self._endings.answered(request, own, beam.finish_reason or FinishReason.LENGTH)
        return replace(output, logprob=beam.logprob)

    def charged(self, requests: Sequence[GenerationRequest], field: str = "") -> AbstractContextManager[None]:
        """Use it around `generate` of each answer that one body asks for. `field` says how many there are. See
        `Admission.charged`."""
        first, charges = requests[0], [one.charge for one in requests]
        in_room = first.room is not None and first.beams is None  # a beam search makes no way
        num_answers = len(requests)
        return self._admission.charged(first.client, charges, num_answers=num_answers, field=field, in_room=in_room)

    def _turn(self, request: GenerationRequest) -> AbstractAsyncContextManager[None]:
        """See `Admission.turn`."""
        num_answers = 1 if request.beams is None else request.beams.beam_width
        cost = len(request.prompt_token_ids) + num_answers * request.sampling_params.max_tokens
        return self._admission.turn(
            request.client, cost, request.deadline, priority=request.priority, places=num_answers
        )


def _puts_end(arrived: asyncio.Queue[NewTokens | None]) -> Callable[[object], None]:
    return lambda _: arrived.put_nowait(None)


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
        complete(self._request, self._progress, self._text.num_tokens, self._num_reasoning_tokens)
        return Output(
            text=end.text,
            tokens=new.tokens,
            prompt_logprobs=new.prompt_logprobs,
            finish_reason=end.finish_reason,
            stop_reason=end.stop_reason,
            report=self._progress.report,
            usage=self._progress.usage,
        )
