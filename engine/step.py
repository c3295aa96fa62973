"""One step of the engine as a value: the blocks that a device copies, the rows that it computes, and what came of them.

    row A (prefill chunk)             row B (decode)
    |<- num_computed ->|<- new ->|    |<-------- num_computed -------->|1|
    block table: ceil((num_computed + new) / block_size) blocks at least, in order

K and V of the new tokens are written to their blocks first, then every new token attends to all tokens of its own
row up to and including itself.

Nothing here refers to a request, a grammar or a device, and nothing here is torch's. So a step can be timed, recorded,
sent, and computed again elsewhere (`engine.replay`).
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from common.batch_time import StepShape
from common.types import SampledToken
from engine.blocks.host_tier import BlockCopy


def no_ids() -> array[int]:
    return array("q")


def no_numbers() -> array[float]:
    return array("f")


@dataclass(slots=True, frozen=True)
class Drawn:
    """The token that a row of an earlier step drew, whichever it was."""

    step: int  # number of the step
    row: int


@dataclass(slots=True, frozen=True, kw_only=True)
class LogitEdits:
    """What changes the logits of one row before its token is drawn, in the order of the fields.

    Token ids are int64 (`array("q")`), numbers float32 (`array("f")`). An id that the model has no logit for is none.
    """

    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seen_ids: array[int] = field(default_factory=no_ids)  # distinct tokens that the penalties are for
    counts: array[float] = field(
        default_factory=no_numbers
    )  # how often each of them is in the answer; 0: in the prompt alone
    bias_ids: array[int] = field(default_factory=no_ids)
    bias: array[float] = field(default_factory=no_numbers)  # one for each of `bias_ids`
    allowed_ids: array[int] = field(default_factory=no_ids)  # empty: any token
    banned_ids: array[int] = field(default_factory=no_ids)
    bad_ids: array[int] = field(default_factory=no_ids)  # banned, too: each would complete a bad word


@dataclass(slots=True, frozen=True, kw_only=True)
class Draw:
    """Asks for one token after a row's last new token.

    What is drawn depends on these numbers and the row's logits alone, never on the other rows or the worker, so that an
    answer continues with the same tokens anywhere.
    """

    index: int  # of the token in its answer
    seed: int = 0
    temperature: float = 1.0  # 0: the likeliest token
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    num_top: int | None = None  # so many of the likeliest tokens are told beside, with logprobs; None: no logprobs
    edits: LogitEdits | None = None
    mask: bytes = b""  # a bit for each token, lowest first, in whole words of 32: may it come next? Empty: any may

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def is_likeliest(self) -> bool:
        """Whether only the argmax of the unchanged logits is asked for."""
        return self.temperature == 0.0 and self.num_top is None and self.edits is None and not self.mask


@dataclass(slots=True, frozen=True, kw_only=True)
class Scoring:
    """Asks for the logprob of each of `token_ids`, given all tokens before it."""

    start: int  # index, among the new tokens, of the token before the first of `token_ids`
    token_ids: list[int]
    num_top: int  # so many of the likeliest beside each


@dataclass(slots=True, frozen=True, kw_only=True)
class StepRow:
    """One request's share of a step; a drafted token is a row of its own."""

    token_ids: list[int]  # the new tokens, at positions num_computed_tokens ...
    num_computed_tokens: int
    block_ids: Sequence[int]  # a request keeps them as int32, which a step copies as memory
    draw: Draw | None = None
    score: Scoring | None = None
    num_pooled: int = 0  # asks for hidden states of so many of the new tokens, the last ones, instead of a token
    first: Drawn | None = None  # what the first of `token_ids` is, if it was not known when the step was made


@dataclass(frozen=True, kw_only=True)
class StepInput:
    number: int  # one more than the device's step before
    rows: Sequence[StepRow]
    copies: Sequence[BlockCopy] = ()  # in this order, before a row's KV is written or read

    @cached_property
    def shape(self) -> StepShape:
        return shape_of(self.rows)


@dataclass(slots=True, frozen=True, kw_only=True)
class StepOutput:
    """What came of a step. Rows are numbered as in its `StepInput`."""

    tokens: list[SampledToken | None]  # of each row; None: it asked for none, none is allowed, or it failed
    scores: Mapping[int, list[SampledToken]] = field(default_factory=dict)  # of the rows with a `Scoring`
    pooled: Mapping[int, list[float]] = field(default_factory=dict)  # sums of hidden states, [hidden_size] each
    failures: Mapping[int, str] = field(default_factory=dict)  # why these rows have no result, one line each
    elapsed_s: float = 0.0  # seconds in which the device was busy with this step
    is_given_up: bool = False  # it ended early, and no row has a result

    @classmethod
    def given_up(cls, step: StepInput) -> StepOutput:
        return cls(tokens=[None] * len(step.rows), is_given_up=True)


def shape_of(rows: Sequence[StepRow]) -> StepShape:
    num_decodes = decode_context = longest = num_chunks = chunk_tokens = chunk_past = chunk_pairs = chunk_squares = 0
    num_head_rows = num_drawn = num_filtered = num_edited = num_masked = num_logprobs = 0
    for row in rows:
        new, past = len(row.token_ids), row.num_computed_tokens
        if new == 1:
            num_decodes += 1
            decode_context += past + 1
            longest = max(longest, past + 1)
        else:
            num_chunks += 1
            chunk_tokens += new
            chunk_past += past
            chunk_pairs += new * past + new * (new + 1) // 2
            chunk_squares += new * new
        if row.score is not None:
            num_head_rows += len(row.score.token_ids)
            num_logprobs += len(row.score.token_ids)
        if (draw := row.draw) is not None:
            num_head_rows += 1
            num_drawn += not draw.is_greedy
            num_filtered += not draw.is_greedy and (draw.top_k > 0 or draw.top_p < 1 or draw.min_p > 0)
            num_edited += draw.edits is not None
            num_masked += bool(draw.mask)
            num_logprobs += draw.num_top is not None
    return StepShape(
        num_decodes=num_decodes,
        decode_context=decode_context,
        longest_context=longest,
        num_chunks=num_chunks,
        chunk_tokens=chunk_tokens,
        chunk_past=chunk_past,
        chunk_pairs=chunk_pairs,
        chunk_squares=chunk_squares,
        num_head_rows=num_head_rows,
        num_drawn=num_drawn,
        num_filtered=num_filtered,
        num_edited=num_edited,
        num_masked=num_masked,
        num_logprobs=num_logprobs,
    )
