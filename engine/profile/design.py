"""Which steps a profile measures: sizes in log space, both sides of every edge, mixtures of all kinds."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from common.batch_time_fit import KNOTS
from common.sampling import SamplingParams
from engine.sampling.draws import draw
from engine.step import StepRow

_GREEDY = SamplingParams(temperature=0.0)
_DRAWN = SamplingParams(seed=7)
_FILTERED = SamplingParams(seed=7, top_p=0.9, top_k=40)
_EDITED = SamplingParams(temperature=0.0, logprobs=2)


@dataclass(slots=True, frozen=True)
class Limits:
    """What the device holds, and what one step may hold."""

    num_blocks: int
    block_size: int
    max_model_len: int
    vocab_size: int
    max_rows: int  # decodes of one step
    max_tokens: int  # new tokens of one step

    @property
    def max_context(self) -> int:
        """Of one row, new tokens included: every row has blocks of its own."""
        return min(self.max_model_len, self.num_blocks * self.block_size)


@dataclass(slots=True, frozen=True)
class Point:
    """One step to measure: the context of each decode, and (new tokens, computed tokens) of each chunk."""

    decodes: tuple[int, ...] = ()
    chunks: tuple[tuple[int, int], ...] = ()
    params: SamplingParams = _GREEDY

    def num_blocks(self, block_size: int) -> int:
        lengths = [*self.decodes, *(new + past for new, past in self.chunks)]
        return sum(-(-length // block_size) for length in lengths)


REFERENCE_DECODES = 4
REFERENCE_CONTEXT = 128


def reference_point(limits: Limits) -> Point:
    """Measured again and again, to divide out how fast the machine is at the moment."""
    return Point(decodes=(min(REFERENCE_CONTEXT, limits.max_context),) * min(REFERENCE_DECODES, limits.max_rows))


def edges(limits: Limits) -> Iterator[Point]:
    """Both sides of every knot: decodes of short contexts, and prompts from their beginning."""
    context = min(64, limits.max_context)
    for knot in KNOTS:
        for count in (knot, knot + 1):
            if count <= limits.max_rows:
                yield Point(decodes=(context,) * count)
            if 1 < count <= min(limits.max_tokens, limits.max_context):
                yield Point(chunks=((count, 0),))


def random_points(limits: Limits, rng: random.Random) -> Iterator[Point]:
    """Without end: decodes, prompts, and both in one step, in turn."""
    while True:
        yield _fitted(Point(decodes=_decodes(limits, rng), params=_params(rng)), limits)
        yield _fitted(Point(chunks=_chunks(limits, rng)), limits)
        yield _fitted(Point(_decodes(limits, rng), _chunks(limits, rng), _params(rng)), limits)


def rows_of(point: Point, limits: Limits, rng: random.Random) -> list[StepRow]:
    """The step's rows, on scattered blocks of their own, with random tokens."""
    free = rng.sample(range(limits.num_blocks), point.num_blocks(limits.block_size))

    def row(new: int, past: int) -> StepRow:
        count = -(-(new + past) // limits.block_size)
        blocks, free[:count] = free[:count], []
        token_ids = [rng.randrange(limits.vocab_size) for _ in range(new)]
        return StepRow(token_ids=token_ids, num_computed_tokens=past, block_ids=blocks, draw=draw(point.params, 0))

    return [*(row(1, context - 1) for context in point.decodes), *(row(new, past) for new, past in point.chunks)]


def _log_uniform(low: int, high: int, rng: random.Random) -> int:
    return round(math.exp(rng.uniform(math.log(low), math.log(max(low, high)))))


def _decodes(limits: Limits, rng: random.Random) -> tuple[int, ...]:
    count = _log_uniform(1, limits.max_rows, rng)
    middle = _log_uniform(8, limits.max_context, rng)
    return tuple(min(limits.max_context, max(1, round(middle * rng.lognormvariate(0, 0.5)))) for _ in range(count))


def _chunks(limits: Limits, rng: random.Random) -> tuple[tuple[int, int], ...]:
    count = rng.choice((1, 1, 1, 2, 3, 4))
    chunks = []
    for _ in range(count):
        new = _log_uniform(2, max(2, min(limits.max_tokens, limits.max_context) // count), rng)
        past = rng.choice((0, _log_uniform(16, limits.max_context, rng)))
        chunks.append((new, max(0, min(past, limits.max_context - new))))
    return tuple(chunks)


def _params(rng: random.Random) -> SamplingParams:
    return rng.choice((_GREEDY, _GREEDY, _DRAWN, _FILTERED, _EDITED))


def _fitted(point: Point, limits: Limits) -> Point:
    """The point with contexts so short that all blocks are there: half as long until they are, and at last fewer."""
    while point.num_blocks(limits.block_size) > limits.num_blocks:
        shorter = Point(
            tuple(max(1, context // 2) for context in point.decodes),
            tuple((max(2, new // 2) if past < 2 else new, past // 2) for new, past in point.chunks),
            point.params,
        )
        if shorter == point and len(point.chunks) > 1:
            shorter = Point(point.decodes, point.chunks[1:], point.params)
        elif shorter == point:
            shorter = Point(point.decodes[1:], point.chunks, point.params)
        point = shorter
    return point
