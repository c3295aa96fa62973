"""The answers to one body: generated side by side, their pieces in one stream. Shared by gRPC and REST."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from common.choices import Choices
from router.serving.generation import Generation
from router.serving.request import GenerationRequest, Output

MAX_AHEAD = 16  # outputs of all choices together that wait for their reader

Outputs = AsyncGenerator[tuple[int, Output], None]
"""Pieces of answers as they come, each with the index of its answer."""


def candidates(requests: Sequence[GenerationRequest], choices: Choices) -> list[GenerationRequest]:
    """One request for each answer. `requests`: one for each prompt. Answers to one prompt are side by side."""
    return [
        request.numbered(number * choices.num_candidates + index)
        for number, request in enumerate(requests)
        for index in range(choices.num_candidates)
    ]


async def likeliest(outputs: Outputs, choices: Choices) -> Outputs:
    """Of the answers to one prompt those that are given, the best first, once all of them are whole."""
    pieces: list[list[Output]] = [[] for _ in range(choices.num_candidates)]
    async with aclosing(outputs):
        async for index, output in outputs:
            pieces[index].append(output)
    tokens = [[token for output in answer for token in output.tokens] for answer in pieces]
    found = [(sum(token.logprob or 0.0 for token in answer), len(answer)) for answer in tokens]
    for index, candidate in enumerate(choices.likeliest(found)):
        for output in pieces[candidate]:
            yield index, output


async def merged(generation: Generation, requests: Sequence[GenerationRequest]) -> Outputs:
    """Outputs of all requests as they come, those of beam searches when they are done. The first failure ends all of
    them. A reader that is slow holds up these requests, and nothing piles up here."""
    if len(requests) == 1 and requests[0].beams is None:
        async with aclosing(generation.generate(requests[0])) as outputs:
            async for output in outputs:
                yield 0, output
        return

    queue: asyncio.Queue[tuple[int, Output] | Exception | None] = asyncio.Queue(MAX_AHEAD)

    async def pump(first: int, group: Sequence[GenerationRequest]) -> None:
        try:
            if group[0].beams is not None:
                for index, output in enumerate(await generation.beams(group), first):
                    await queue.put((index, output))
            else:
                async with aclosing(generation.generate(group[0])) as outputs:
                    async for output in outputs:
                        await queue.put((first, output))
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
