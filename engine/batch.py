"""What one engine step asks of the model: the tokens of several requests, flattened into one forward pass.

    request A (prefill chunk)         request B (decode)
    |<- num_computed ->|<- new ->|    |<-------- num_computed -------->|1|
    block table: ceil((num_computed + new) / block_size) blocks at least, in order

K and V of the new tokens are written to their blocks first, then every new token attends to all tokens of its own
request up to and including itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from common.sampling import SamplingParams
from common.types import SampledToken
from engine.guide_state import GuideState
from engine.logit_changes import LogitChanges


@dataclass(slots=True, frozen=True, kw_only=True)
class SampleInput:
    """Asks for one token after the sequence's last new token.

    The draw depends only on `params.seed`, `num_output_tokens` and the logits, never on the batch or the worker, so
    that a request continues with the same tokens anywhere.
    """

    params: SamplingParams
    num_output_tokens: int  # already generated: the index of the token to be sampled
    changes: LogitChanges | None = None  # unless the logits are taken as they are
    guide: GuideState | None = None  # of guided text; it has taken in the tokens so far


@dataclass(slots=True, frozen=True)
class Pooled:
    """Hidden states of a sequence's new tokens, after the model's last norm, added up."""

    total: list[float]  # [hidden_size]


@dataclass(slots=True, frozen=True, kw_only=True)
class ScoreInput:
    """Asks for the logprob of each of `token_ids`, given all tokens before it."""

    start: int  # index among the new tokens of the one that comes before the first of `token_ids`
    token_ids: list[int]
    num_top: int  # so many of the likeliest beside each


@dataclass(slots=True, frozen=True)
class Scored:
    """Logprobs for a `ScoreInput`, beside what else the sequence asked for."""

    scores: list[SampledToken]
    token: SampledToken | None


StepOutput = SampledToken | Pooled | Scored | None
"""What one sequence gets from a step; None if it asked for nothing, or no token is allowed."""


@dataclass(slots=True, frozen=True, kw_only=True)
class SequenceInput:
    """One request's share of a step."""

    token_ids: list[int]  # the new tokens, at positions num_computed_tokens ...
    num_computed_tokens: int
    block_ids: Sequence[int]  # a request keeps them as int32, which a step copies as memory
    sample: SampleInput | None = None
    num_pooled: int = 0  # asks for hidden states of so many of the new tokens, the last ones, instead of a token
    score: ScoreInput | None = None
