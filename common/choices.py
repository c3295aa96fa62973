"""How many answers a request asks for to one prompt: said once for REST, gRPC and the Python clients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

from common.beam_search import MAX_LENGTH_PENALTY
from common.errors import InvalidArgumentError
from common.sampling import FieldName, SamplingOptions

MAX_N = 128  # OpenAI's
MAX_BEAM_WIDTH = 8
MAX_BEST_OF = 20  # OpenAI's


@dataclass(slots=True, frozen=True, kw_only=True)
class Choices:
    """`best_of` answers are generated, and the `n` answers with the highest logprob per token are returned. With
    `use_beam_search` the answers are the `n` best sequences of a search of that width (`common.beam_search`)."""

    n: int = 1
    best_of: int | None = None  # n
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: bool = False

    @property
    def num_candidates(self) -> int:
        """How many answers are generated for each prompt."""
        return self.n if self.best_of is None else self.best_of

    @property
    def are_compared(self) -> bool:
        """Whether only some candidates are returned. All of them have to be complete before the first one is
        returned."""
        return self.num_candidates > self.n

    def check(self, name: FieldName = str) -> None:
        """Raises `InvalidArgumentError` with the field as the client wrote it."""
        if not 1 <= self.n <= MAX_N:
            raise InvalidArgumentError(name("n"), f"must be in [1, {MAX_N}], not {self.n}")
        if self.use_beam_search and self.n > MAX_BEAM_WIDTH:
            raise InvalidArgumentError(name("n"), f"must be at most {MAX_BEAM_WIDTH} in a beam search, not {self.n}")
        if self.best_of not in (None, self.n) and not self.n <= self.num_candidates <= MAX_BEST_OF:
            raise InvalidArgumentError(name("best_of"), f"must be in [n, {MAX_BEST_OF}], not {self.best_of}")
        if self.use_beam_search and self.are_compared:
            raise InvalidArgumentError(name("best_of"), "must equal n in a beam search, whose width n is")
        if not -MAX_LENGTH_PENALTY <= self.length_penalty <= MAX_LENGTH_PENALTY:
            reason = f"must be in [{-MAX_LENGTH_PENALTY}, {MAX_LENGTH_PENALTY}], not {self.length_penalty}"
            raise InvalidArgumentError(name("length_penalty"), reason)
        if not self.use_beam_search and self.length_penalty != 1.0:
            raise InvalidArgumentError(name("length_penalty"), "needs use_beam_search")
        if not self.use_beam_search and self.early_stopping:
            raise InvalidArgumentError(name("early_stopping"), "needs use_beam_search")

    def field(self) -> str:
        """The field that says how many candidates there are."""
        return "best_of" if self.are_compared else "n"

    def likeliest(self, candidates: Sequence[tuple[float, int]]) -> list[int]:
        """Which candidates for one prompt are returned, best first. Each candidate is given as (the sum of its tokens'
        logprobs, its number of tokens)."""
        if not self.are_compared:
            return list(range(len(candidates)))
        per_token = [logprob / max(num_tokens, 1) for logprob, num_tokens in candidates]
        return sorted(range(len(candidates)), key=lambda index: -per_token[index])[: self.n]


class ChoiceOptions(TypedDict, total=False):
    """`Choices` as keyword arguments."""

    n: int
    best_of: int
    use_beam_search: bool
    length_penalty: float
    early_stopping: bool


class AnswerOptions(SamplingOptions, ChoiceOptions, total=False):
    """What a client may say about the answers to one prompt."""
