"""How many tokens one request may ask for, of all its answers together, so that none takes a router for itself.

Each four logprobs beside a token count as one more token, and so do those of the prompt if they are asked for. In an
answer that is kept until it is whole each of them counts: a logprob takes about a hundred bytes of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from common.choices import Choices
from common.errors import InvalidArgumentError
from common.sampling import MAX_LOGPROBS, FieldName, GivenSampling, SamplingParams
from router.fleet.served_model import ServedModel
from router.running.beams import MAX_BLOCKS, most_tokens

MAX_ANSWER_TOKENS = 2**20  # unless one answer as long as the context is more
LOGPROBS_OF_A_TOKEN = 4  # so many are as much work for the router as one more token: they only have to be written out


@dataclass(slots=True, frozen=True, kw_only=True)
class AnswerBudget:
    """The tokens that one request body asks for, and the most that it may ask for."""

    allowed: int
    num_answers: int
    num_prompt_tokens: int
    num_logprobs: int  # beside each token
    is_whole: bool
    num_of_prompt: int  # what the prompt's logprobs count, for all answers
    most_of_search: int | None  # tokens of an answer by beam search; None without one
    name: FieldName

    @classmethod
    def of(
        cls,
        model: ServedModel,
        sampling: GivenSampling,
        choices: Choices,
        *,
        max_answer_tokens: int | None,
        num_answers: int,
        num_prompt_tokens: int,
        is_whole: bool,
        name: FieldName,
    ) -> AnswerBudget:
        """`max_answer_tokens`: what is allowed; None: as many as one answer may need, and MAX_ANSWER_TOKENS at least.
        `is_whole`: whether answers are kept until they are whole. Raises `InvalidArgumentError` if the prompt's
        logprobs and one token of each answer are too many."""
        num_of_prompt = 0
        if sampling.get("prompt_logprobs") is not None:
            weight = _weight(_num_logprobs(sampling, "prompt_logprobs"), is_whole=is_whole)
            num_of_prompt = num_answers * num_prompt_tokens * weight
        longest = model.limits.max_model_len * _weight(MAX_LOGPROBS, is_whole=is_whole)
        budget = cls(
            allowed=max_answer_tokens or max(MAX_ANSWER_TOKENS, longest),
            num_answers=num_answers,
            num_prompt_tokens=num_prompt_tokens,
            num_logprobs=_num_logprobs(sampling, "logprobs"),
            is_whole=is_whole,
            num_of_prompt=num_of_prompt,
            most_of_search=most_tokens(num_answers, num_prompt_tokens, model.block_size)
            if choices.use_beam_search
            else None,
            name=name,
        )
        if num_of_prompt and num_of_prompt + budget.counted > budget.allowed:
            raise InvalidArgumentError(
                name("prompt_logprobs"),
                f"those of {num_prompt_tokens} prompt tokens for {num_answers} answers, and one token of each, "
                f"count as {num_of_prompt + budget.counted}: this router allows one request {budget.allowed}",
            )
        return budget

    @property
    def counted(self) -> int:
        """What one more token of each answer counts, in all answers together."""
        return self.num_answers * _weight(self.num_logprobs, is_whole=self.is_whole)

    def most(self) -> int:
        """Most tokens of each answer, at least one; if there is no room for one, `check` refuses the request."""
        most = (self.allowed - self.num_of_prompt) // self.counted
        return max(1, most if self.most_of_search is None else min(most, self.most_of_search))

    def check(self, params: SamplingParams, *, is_max_given: bool) -> None:
        """Raises `InvalidArgumentError`. `is_max_given`: by the client, and not `most`."""
        count = params.max_tokens * self.counted
        if count + self.num_of_prompt > self.allowed:
            is_for_min = not is_max_given and params.min_tokens > self.most()
            of_prompt = f", and its prompt's as {self.num_of_prompt}" if self.num_of_prompt else ""
            raise InvalidArgumentError(
                self.name("min_tokens" if is_for_min else "max_tokens"),
                f"{params.max_tokens} tokens of {self.num_answers} answers with {self.num_logprobs} logprobs count as "
                f"{count}{of_prompt}: this router allows one request {self.allowed}",
            )
        if self.most_of_search is not None and params.max_tokens > self.most_of_search:
            raise InvalidArgumentError(
                self.name("max_tokens"),
                f"each of {params.max_tokens} tokens of {self.num_answers} beams is a request with the whole prompt: "
                f"after {self.num_prompt_tokens} tokens {self.most_of_search} tokens are the most, so that all "
                f"requests name {MAX_BLOCKS} of its KV blocks at most",
            )


def _num_logprobs(sampling: GivenSampling, name: str) -> int:
    """The logprobs for each token that the client asked for, allowed or not."""
    given = sampling.get(name)
    return min(max(given, 0), MAX_LOGPROBS) if isinstance(given, int) else 0


def _weight(num_logprobs: int, *, is_whole: bool) -> int:
    """What one token counts, together with its logprobs."""
    return 1 + num_logprobs if is_whole else 1 + math.ceil(num_logprobs / LOGPROBS_OF_A_TOKEN)
