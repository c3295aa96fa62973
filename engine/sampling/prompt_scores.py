"""Which of a prompt's own tokens a step has to score."""

from __future__ import annotations

from engine.request import Request
from engine.step import Scoring

MAX_EVENT_TOKENS = 256  # in one message


def next_scores(request: Request, num_new: int) -> Scoring | None:
    """The tokens of the prompt that a step with `num_new` tokens of the request has to score: those without a score
    yet. A preempted request computes scored tokens again."""
    num_top = request.sampling_params.prompt_logprobs
    if num_top is None:
        return None
    start = request.num_computed_tokens
    first = max(start + 1, request.num_prompt_tokens - request.num_unscored_tokens)
    token_ids = request.token_ids[first : min(start + num_new + 1, request.num_prompt_tokens)]
    return Scoring(start=first - 1 - start, token_ids=token_ids, num_top=num_top) if token_ids else None
