"""How long a step of an engine takes: one fitted model of time, evaluated in microseconds.

    seconds = layers(tokens) + head(rows) + sum of coefficient * feature,  times  e^residual(tokens, attention)

`layers` and `head` are tables, monotone and linear between knots: they hold the floor of reading the weights, and each
edge at which a device computes otherwise. The features are sums over the step's rows, so attention is exact also for a
chunk that continues a prompt. There is a model for each regime (decodes alone, prompts alone, both), since each repeats
the others' errors otherwise. The residual is what is left on a grid of sizes; it fades to nothing where nothing was
measured. Quantiles are those of the error that then remains.

Pure, and without numpy: a scheduler asks for each step. `common.batch_time_fit` makes the coefficients.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

MAX_RESIDUAL = math.log(2.0)
MAX_DECODES = 4096  # numbers of decodes whose times are kept


class StepShape(msgspec.Struct, frozen=True, kw_only=True):
    """The sums of a step that its time depends on. Tokens, unless said otherwise."""

    num_decodes: int = 0  # rows of one new token
    decode_context: int = 0  # that these rows attend to, their new token included
    longest_context: int = 0  # of one of these rows
    num_chunks: int = 0  # rows of several new tokens
    chunk_tokens: int = 0  # new tokens of these rows
    chunk_past: int = 0  # computed tokens before them
    chunk_pairs: int = 0  # (query, key) pairs of their attention: new * past + new * (new + 1) / 2
    chunk_squares: int = 0  # new * new of each
    num_head_rows: int = 0  # rows of hidden states that go through the head
    num_drawn: int = 0  # rows that draw by chance
    num_filtered: int = 0  # of those, with top-k, top-p or min-p
    num_edited: int = 0  # rows whose logits are changed
    num_masked: int = 0  # rows with a mask
    num_logprobs: int = 0  # rows that ask for logprobs, scored tokens included

    @property
    def num_tokens(self) -> int:
        """New tokens: rows of the products with the layers' weights."""
        return self.num_decodes + self.chunk_tokens

    @property
    def regime(self) -> Regime:
        if not self.num_chunks:
            return Regime.DECODE
        return Regime.MIXED if self.num_decodes else Regime.PREFILL


NO_DECODES = StepShape()


def chunk_shape(new: int, past: int, beside: StepShape = NO_DECODES) -> StepShape:
    """The shape of a step that computes `new` tokens of one prompt behind `past` computed ones, and the decodes of
    `beside`, which only read the KV before them and draw nothing by chance."""
    return StepShape(
        num_decodes=beside.num_decodes,
        decode_context=beside.decode_context,
        longest_context=beside.longest_context,
        num_chunks=1,
        chunk_tokens=new,
        chunk_past=past,
        chunk_pairs=new * past + new * (new + 1) // 2,
        chunk_squares=new * new,
        num_head_rows=beside.num_head_rows + 1,
    )


class Regime(StrEnum):
    DECODE = "decode"
    PREFILL = "prefill"
    MIXED = "mixed"


FEATURES = (
    "decode_context",
    "longest_context",
    "chunk_pairs",
    "chunk_past",
    "num_chunks",
    "num_drawn",
    "num_filtered",
    "num_edited",
    "num_masked",
    "num_logprobs",
)
"""Fields of `StepShape` that have a coefficient: seconds for each."""
_PAIRS, _PAST, _CHUNKS = map(FEATURES.index, ("chunk_pairs", "chunk_past", "num_chunks"))


@dataclass(slots=True, frozen=True)
class Table:
    """Seconds by a count: linear between knots, as steep after the last one as before it, never falling."""

    knots: tuple[float, ...] = (0.0,)
    seconds: tuple[float, ...] = (0.0,)
    last_slope: float = 0.0  # seconds for each one after the last knot

    def at(self, count: float) -> float:
        knots, seconds = self.knots, self.seconds
        if not (place := bisect_right(knots, count)):
            return seconds[0]
        low, start = knots[place - 1], seconds[place - 1]
        if place == len(knots):
            return start + (count - low) * self.last_slope
        return start + (count - low) / (knots[place] - low) * (seconds[place] - start)


@dataclass(slots=True, frozen=True, kw_only=True)
class RegimeTime:
    """The model of one regime."""

    layers: Table
    head: Table
    coefficients: tuple[float, ...]  # one for each of `FEATURES`, none negative
    residuals: Mapping[tuple[int, int], float] = field(default_factory=dict)  # by log2 of tokens and of attention
    p90: float = 0.0  # natural logarithm of actual / predicted that nine in ten steps stay below
    p99: float = 0.0
    num_steps: int = 0  # that the model was fitted to
    # Of layers and head, by the number of decodes: found once, since a router asks at each load report.
    _of_decodes: dict[int, float] = field(default_factory=dict, init=False, repr=False, compare=False)

    def seconds(self, shape: StepShape) -> float:
        """The median."""
        time = self.plain_seconds(shape)
        if self.residuals:
            time *= math.exp(self.residual(shape.num_tokens, shape.decode_context + shape.chunk_pairs))
        return time

    def of_decodes(self, num: int) -> float:
        """The median of a step of so many decodes, but for their context and the residual."""
        if (seconds := self._of_decodes.get(num)) is None:
            if len(self._of_decodes) >= MAX_DECODES:
                self._of_decodes.clear()
            seconds = self._of_decodes[num] = self.layers.at(num) + self.head.at(num)
        return seconds

    def plain_seconds(self, shape: StepShape) -> float:
        """Without the residual. Never falls if a field of `shape` grows."""
        context, longest, pairs, past, chunks, drawn, filtered, edited, masked, logprobs = self.coefficients
        return (
            self.layers.at(shape.num_decodes + shape.chunk_tokens)
            + self.head.at(shape.num_head_rows)
            + context * shape.decode_context
            + longest * shape.longest_context
            + pairs * shape.chunk_pairs
            + past * shape.chunk_past
            + chunks * shape.num_chunks
            + drawn * shape.num_drawn
            + filtered * shape.num_filtered
            + edited * shape.num_edited
            + masked * shape.num_masked
            + logprobs * shape.num_logprobs
        )

    def residual(self, num_tokens: int, attention: int) -> float:
        """Natural logarithm of what the plain model is wrong by, between the four nearest cells of the grid."""
        x, y = math.log2(num_tokens + 1), math.log2(attention + 1)
        left, low = int(x), int(y)
        right_share, high_share = x - left, y - low
        get = self.residuals.get
        below = get((left, low), 0.0) * (1 - right_share) + get((left + 1, low), 0.0) * right_share
        above = get((left, low + 1), 0.0) * (1 - right_share) + get((left + 1, low + 1), 0.0) * right_share
        return below * (1 - high_share) + above * high_share


@dataclass(slots=True, frozen=True)
class Prediction:
    """Seconds of a step."""

    median: float
    p90: float
    p99: float


@dataclass(slots=True, frozen=True, kw_only=True)
class BatchTimeKey:
    """What a model of time was fitted to. It says nothing of others."""

    spec: str  # fingerprint of the KV: the model's weights, KV dtype and block size
    quantization: str
    device: str  # cpu, cuda:0
    processor: str  # its name
    kernels: str  # instruction set, or torch
    num_threads: int
    num_ranks: int = 1


@dataclass(slots=True, frozen=True, kw_only=True)
class BatchTime:
    key: BatchTimeKey
    regimes: Mapping[Regime, RegimeTime]

    def predict(self, shape: StepShape) -> Prediction:
        regime = self._regime(shape)
        median = regime.seconds(shape)
        return Prediction(median, median * math.exp(regime.p90), median * math.exp(regime.p99))

    def seconds(self, shape: StepShape) -> float:
        """The median alone."""
        return self._regime(shape).seconds(shape)

    def decode_seconds(self, num_decodes: int, context: int, longest: int) -> float:
        """`seconds` of a step of decodes alone, in a third of the time: a router asks at each load report."""
        regime = self.regimes[Regime.DECODE]
        coefficients = regime.coefficients
        seconds = regime.of_decodes(num_decodes) + coefficients[0] * context + coefficients[1] * longest
        if regime.residuals:
            seconds *= math.exp(regime.residual(num_decodes, context))
        return seconds

    def tokens_within(self, seconds: float, shape: StepShape, past: int, most: int) -> int:
        """How many further tokens of one prompt, of which `past` are computed, a step of `shape` may take so that nine
        in ten such steps end within `seconds`: 0 to `most`. The prompt's last token draws nothing yet."""
        regime = self.regimes[Regime.MIXED if shape.num_decodes else Regime.PREFILL]
        pairs = regime.coefficients[_PAIRS]
        beside = (
            regime.plain_seconds(shape)
            - regime.layers.at(shape.num_tokens)
            + regime.coefficients[_PAST] * past
            + regime.coefficients[_CHUNKS]
        )
        # The residual of the largest chunk stands for all: it changes by a few hundredths from one to the next.
        attention = shape.decode_context + shape.chunk_pairs
        scale = math.exp(regime.p90)
        if regime.residuals:
            whole = attention + most * past + most * (most + 1) // 2
            scale *= math.exp(
                max(regime.residual(shape.num_tokens + most, whole), regime.residual(shape.num_tokens + 1, attention))
            )
        left = seconds / scale - beside
        layers, num_tokens = regime.layers, shape.num_tokens

        def fits(new: int) -> bool:
            return layers.at(num_tokens + new) + pairs * (new * past + new * (new + 1) * 0.5) <= left

        if most < 1 or fits(most):
            return max(most, 0)
        # `low` fits, or is none, and `high` does not. Of the knots between them, those whose table alone is above
        # `left` do not fit, and mostly the one before these does.
        low, high, knots = 0, most, layers.knots
        first, last = bisect_right(knots, num_tokens), bisect_left(knots, num_tokens + most)
        if (above := bisect_right(layers.seconds, left, first, last)) < last:
            last, high = above, math.ceil(knots[above]) - num_tokens
        middle = last - 1
        while first < last:
            new = int(knot := knots[middle]) - num_tokens
            at = layers.seconds[middle] if num_tokens + new == knot else layers.at(num_tokens + new)
            if at + pairs * (new * past + new * (new + 1) * 0.5) <= left:
                low, first = new, middle + 1
            else:
                high, last = new, middle
            middle = (first + last) // 2
        if high <= low + 1:
            return low
        # No knot lies between them, so that the time there is a quadratic of the number of tokens.
        start = layers.at(num_tokens + low)
        slope = (layers.at(num_tokens + high) - start) / (high - low)
        linear, rest = slope + pairs * (past + 0.5), left - start + slope * low
        divisor = linear + math.sqrt(max(0.0, linear * linear + 2 * pairs * rest))
        new = min(high - 1, max(low, int(2 * rest / divisor))) if divisor else low
        while new > low and not fits(new):  # rounding
            new -= 1
        while new + 1 < high and fits(new + 1):
            new += 1
        return new

    def _regime(self, shape: StepShape) -> RegimeTime:
        if not shape.num_chunks:
            return self.regimes[Regime.DECODE]
        return self.regimes[Regime.MIXED if shape.num_decodes else Regime.PREFILL]


MAX_KEPT_CHUNKS = 256


class ChunkTime:
    """Seconds of steps that compute one chunk of a prompt beside the same decodes, those of `chunk_shape`: quicker than
    `BatchTime.seconds` several times, since a router asks for some twenty a decision."""

    __slots__ = ("_context", "_fixed_s", "_kept", "_layers", "_num_decodes", "_pair_s", "_past_s", "_regime")

    def __init__(self, time: BatchTime, num_decodes: int = 0, context: int = 0, longest: int = 0) -> None:
        """The decodes are those of `BatchTime.decode_seconds`, and draw nothing by chance."""
        self._regime = regime = time.regimes[Regime.MIXED if num_decodes else Regime.PREFILL]
        context_s, longest_s, self._pair_s, self._past_s, chunk_s = regime.coefficients[:5]
        self._layers, self._num_decodes, self._context = regime.layers, num_decodes, context
        self._fixed_s = regime.head.at(num_decodes + 1) + context_s * context + longest_s * longest + chunk_s
        self._kept: dict[tuple[int, int], float] = {}

    def seconds(self, new: int, past: int) -> float:
        """With `new` tokens of the prompt behind `past` computed ones."""
        num_tokens, num_pairs = self._num_decodes + new, new * past + new * (new + 1) // 2
        seconds = self._layers.at(num_tokens) + self._pair_s * num_pairs + self._past_s * past + self._fixed_s
        if self._regime.residuals:
            seconds *= math.exp(self._regime.residual(num_tokens, self._context + num_pairs))
        return seconds

    def kept_seconds(self, new: int, past: int) -> float:
        """`seconds` of a chunk that many prompts have: a full one."""
        name = new, past
        if (kept := self._kept.get(name)) is None:
            if len(self._kept) >= MAX_KEPT_CHUNKS:
                self._kept.clear()
            kept = self._kept[name] = self.seconds(new, past)
        return kept
