"""Beam search: which sequences go on, and which are the best in the end. Pure: the caller runs the model, and says how
likely each next token is.

Equal to transformers' search (`num_beams`, without sampling), which differs from the textbook in when it ends: see
`BeamSearch.advance`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from common.errors import InvalidArgumentError
from common.types import FinishReason, TokenLogprob

MAX_BEAM_WIDTH = 128
MAX_LENGTH_PENALTY = 100


@dataclass(slots=True, frozen=True, kw_only=True)
class BeamSearchParams:
    """`beam_width` sequences of `max_tokens` tokens at most. What has ended is compared by the sum of its logprobs
    divided by its number of tokens to the power of `length_penalty`: above 0, longer sequences are preferred.

    `early_stopping`: the search ends as soon as so many sequences have ended, and not when no other is likely to be
    better. Raises `InvalidArgumentError`.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0  # any other is refused: the search draws nothing
    length_penalty: float = 1.0
    early_stopping: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.beam_width <= MAX_BEAM_WIDTH:
            raise InvalidArgumentError("beam_width", f"must be in [1, {MAX_BEAM_WIDTH}], not {self.beam_width}")
        if self.max_tokens < 1:
            raise InvalidArgumentError("max_tokens", f"must be at least 1, not {self.max_tokens}")
        if self.temperature != 0:
            raise InvalidArgumentError("temperature", f"must be 0, not {self.temperature}: beam search draws nothing")
        if not -MAX_LENGTH_PENALTY <= self.length_penalty <= MAX_LENGTH_PENALTY:
            reason = f"must be in [{-MAX_LENGTH_PENALTY}, {MAX_LENGTH_PENALTY}], not {self.length_penalty}"
            raise InvalidArgumentError("length_penalty", reason)


@dataclass(slots=True, frozen=True)
class Beam:
    """One sequence, without its prompt."""

    token_ids: tuple[int, ...]
    logprob: float  # of all its tokens together
    finish_reason: FinishReason | None = None  # None while it may go on

    def score(self, length_penalty: float) -> float:
        return float(self.logprob / len(self.token_ids) ** length_penalty)


class BeamSearch:
    """The search for one prompt: while `running` is not empty, `advance` wants to know how each of it may go on."""

    def __init__(self, params: BeamSearchParams, eos_token_ids: Collection[int]) -> None:
        self._params = params
        self._eos_token_ids = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        self.running = [Beam((), 0.0)]
        self.finished: list[Beam] = []  # the best of them, best first; as many as wanted once `running` is empty

    @property
    def num_candidates(self) -> int:
        """How many of the likeliest continuations of all sequences are compared, as in transformers."""
        return self._params.beam_width * max(2, 1 + len(self._eos_token_ids))

    @property
    def num_next(self) -> int:
        """How many of the likeliest next tokens each sequence needs: even if every end-of-sequence token is among them,
        `beam_width` tokens are left that go on."""
        return self._params.beam_width + len(self._eos_token_ids)

    def advance(self, next_tokens: Sequence[Sequence[TokenLogprob]]) -> None:
        """`next_tokens`: for each of `running`, its `num_next` likeliest next tokens, or all that there are.

        A sequence that ends counts only if it is among the `beam_width` best of its length. The search is over
        at `max_tokens`, or if `beam_width` sequences have ended and either `early_stopping` is on or the best that goes
        on would be no better than the worst of them if it ended now.
        """
        params = self._params
        candidates = [
            self._grown(beam, token) for beam, tokens in zip(self.running, next_tokens, strict=True) for token in tokens
        ]
        candidates.sort(key=lambda beam: -beam.logprob)
        del candidates[self.num_candidates :]
        ended = [beam for beam in candidates[: params.beam_width] if beam.finish_reason is not None]
        # The sort is stable: of two that are equally good, the one that ended first stays first.
        self.finished = sorted([*self.finished, *ended], key=lambda beam: -beam.score(params.length_penalty))
        del self.finished[params.beam_width :]
        self.running = [beam for beam in candidates if beam.finish_reason is None][: params.beam_width]
        if self.running and len(self.finished) == params.beam_width:
            best, worst = (beam.score(params.length_penalty) for beam in (self.running[0], self.finished[-1]))
            if params.early_stopping or best <= worst:
                self.running = []

    def _grown(self, beam: Beam, token: TokenLogprob) -> Beam:
        token_ids = (*beam.token_ids, token.token_id)
        reason = None
        if token.token_id in self._eos_token_ids:
            reason = FinishReason.STOP
        elif len(token_ids) == self._params.max_tokens:
            reason = FinishReason.LENGTH
        return Beam(token_ids, beam.logprob + token.logprob, reason)
