"""What `LLM` is asked for besides prompts."""

from __future__ import annotations

from typing import Unpack, cast

from common.errors import InvalidArgumentError
from common.sampling import SamplingOptions, parameters

MAX_N = 128
DEFAULT_MAX_TOKENS = 16  # as in vLLM, and in OpenAI's completions


class SamplingParams:
    """How answers are sampled, for `LLM`. The parameters are those of every other interface (`common.sampling`).

    `n` answers are given for each prompt: the best of `best_of`, by logprob per token. They get seeds that follow each
    other. What is None is unset. `max_tokens` is 16 if it is not given; None is what is left of the context.
    """

    def __init__(self, *, n: int = 1, best_of: int | None = None, **options: Unpack[SamplingOptions]) -> None:
        if not 1 <= n <= MAX_N:
            raise InvalidArgumentError("n", f"must be in [1, {MAX_N}], not {n}")
        if best_of is not None and not n <= best_of <= MAX_N:
            raise InvalidArgumentError("best_of", f"must be in [n, {MAX_N}], not {best_of}")
        for name in options:
            if name not in parameters():
                raise InvalidArgumentError(name, "is no sampling parameter")
        self.n = n
        self.num_candidates = n if best_of is None else best_of
        all_options = {"max_tokens": DEFAULT_MAX_TOKENS, **options}
        given = {name: value for name, value in all_options.items() if value is not None}
        for name, value in given.items():
            if parameters()[name].is_texts and isinstance(value, str):
                given[name] = (value,)
        self.wants_logprobs = "logprobs" in given
        if self.num_candidates > n:
            given.setdefault("logprobs", 0)  # they decide which are the best
        self.options = cast("SamplingOptions", given)
