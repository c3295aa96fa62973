"""The answers to one request body, generated side by side, with their pieces in one stream. Shared by gRPC and REST."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol

from common.choices import Choices
from common.types import SampledToken
from router.running.request import GenerationRequest, Output, Siblings

MAX_AHEAD = 16  # outputs of all choices together that wait for their reader

Hold = Callable[[int], None]
"""Is told of the bytes that are kept for answers, and raises `OverloadedError` if there are too many."""

Outputs = AsyncGenerator[tuple[int, Output], None]
"""Pieces of answers as they come, each with the index of its answer."""


class Generates(Protocol):
    """What generates single answers (`Generation`)."""

    def generate(self, request: GenerationRequest, index: int = 0) -> Outputs: ...

    async def beams(self, requests: Sequence[GenerationRequest]) -> list[Output]: ...


async def likeliest(outputs: Outputs, choices: Choices, hold: Hold) -> Outputs:
    """The answers to one prompt that are returned, best first, once all candidates are complete. `hold` is told of what
    is kept until then."""
    pieces: list[list[Output]] = [[] for _ in range(choices.num_candidates)]
    async with aclosing(outputs):
        async for index, output in outputs:
            hold(output.num_kept_bytes)
            pieces[index].append(output)
    tokens = [[token for output in answer for token in output.tokens] for answer in pieces]
    found = [(sum(token.logprob or 0.0 for token in answer), len(answer)) for answer in tokens]
    for index, candidate in enumerate(choices.likeliest(found)):
        for output in pieces[candidate]:
            yield index, output


@dataclass(slots=True)
class _Scores:
    """A prompt's logprobs, as its first answer has them. They are kept until the last answer has begun."""

    num_missing: int
    num_readers: int  # further answers that did not repeat them yet
    hold: Hold
    pieces: list[Sequence[SampledToken]] = field(default_factory=list)
    are_whole: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, output: Output) -> None:
        if output.prompt_logprobs:
            self.num_missing -= len(output.prompt_logprobs)
            if self.num_readers:
                self.hold(Output(text="", tokens=[], prompt_logprobs=output.prompt_logprobs).num_kept_bytes)
                self.pieces.append(output.prompt_logprobs)
        if self.num_missing <= 0 or output.tokens or output.finish_reason:  # no token comes before the last of them
            self.are_whole.set()

    def repeated(self) -> None:
        """One more answer has repeated them."""
        self.num_readers -= 1
        if not self.num_readers:
            self.pieces.clear()


async def _answer(generation: Generates, request: GenerationRequest, index: int, scores: _Scores | None) -> Outputs:
    """Outputs of `request`, the `index`-th. `scores`: of its prompt, if a client wants them.

    A further answer begins when the first one has all of the prompt's logprobs, and finds the prompt's KV blocks on the
    worker that computed them. It repeats these logprobs before its own outputs. It waits here and not in the queue, so
    that it takes no place from the first answer.
    """
    if scores is not None and not request.wants_prompt_logprobs:
        await scores.are_whole.wait()
        for piece in scores.pieces:
            yield index, Output(text="", tokens=[], prompt_logprobs=piece)
        scores.repeated()
        scores = None
    async with aclosing(generation.generate(request, index)) as outputs:
        async for _, output in outputs:
            if scores is not None:
                scores.add(output)
            yield index, output


def _shared_scores(requests: Sequence[GenerationRequest], hold: Hold) -> dict[Siblings, _Scores]:
    num_answers = Counter(one.siblings for one in requests)
    return {
        one.siblings: _Scores(len(one.prompt_token_ids) - 1, num_answers[one.siblings] - 1, hold)
        for one in requests
        if one.wants_prompt_logprobs
    }


async def side_by_side(generation: Generates, requests: Sequence[GenerationRequest], hold: Hold) -> Outputs:
    """Outputs of all requests as they come, those of beam searches when they are done. All answers to a prompt have its
    logprobs, although only the first one asked for them: `hold` is told of them. The first failure ends all of them. A
    reader that is slow holds up these requests, and nothing else piles up here."""
    queue: asyncio.Queue[tuple[int, Output] | Exception | None] = asyncio.Queue(MAX_AHEAD)
    scores = _shared_scores(requests, hold)

    async def pump(first: int, group: Sequence[GenerationRequest]) -> None:
        try:
            if group[0].beams is not None:
                for index, output in enumerate(await generation.beams(group), first):
                    await queue.put((index, output))
            else:
                of_prompt = scores.get(group[0].siblings)
                async with aclosing(_answer(generation, group[0], first, of_prompt)) as outputs:
                    async for piece in outputs:
                        await queue.put(piece)
            await queue.put(None)
        except Exception as error:  # raised where the queue is read
            await queue.put(error)

    num_together = 1 if requests[0].beams is None else requests[0].beams.beam_width
    tasks = [
        asyncio.create_task(pump(first, requests[first : first + num_together]))
        for first in range(0, len(requests), num_together)
    ]
    try:
        num_running = len(tasks)
        while num_running:
            item = await queue.get()
            if item is None:
                num_running -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
