"""Logprobs of a prompt's own tokens: how likely the model finds each of them, given those before it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch

from common.types import SampledToken, TokenLogprob
from engine.batch import ScoreInput
from engine.device_copies import read, to_device
from engine.request import Request

MAX_LOGITS = 2**23  # at once, 32 MiB: a prompt's would be gigabytes
MAX_EVENT_TOKENS = 256  # in one message


class Head(Protocol):
    vocab_size: int

    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...


def score_tokens(
    hidden: torch.Tensor, score: ScoreInput, model: Head, between_slices: Callable[[], None]
) -> list[SampledToken]:
    """One entry for each of `score.token_ids`. `hidden` `[num_new_tokens, hidden_size]`: of the sequence's new tokens.

    Logits are computed for a slice of tokens at a time, and `between_slices` is called after each."""
    size = max(1, MAX_LOGITS // model.vocab_size)
    result: list[SampledToken] = []
    for start in range(0, len(score.token_ids), size):
        token_ids = score.token_ids[start : start + size]
        first = score.start + start
        logprobs = model.logits(hidden[first : first + len(token_ids)]).float().log_softmax(-1)
        result += _scores(logprobs, token_ids, score.num_top)
        between_slices()
    return result


def _scores(logprobs: torch.Tensor, token_ids: Sequence[int], num_top: int) -> Iterator[SampledToken]:
    own = logprobs.gather(1, to_device(token_ids, logprobs.device)[:, None])
    num_top = min(num_top, logprobs.shape[-1])
    logprob, ids, values = read([own, *reversed(logprobs.topk(num_top, dim=-1))])
    for row, token_id in enumerate(token_ids):
        top = slice(row * num_top, (row + 1) * num_top)
        yield SampledToken(token_id, logprob[row], tuple(map(TokenLogprob, map(int, ids[top]), values[top])))


def next_scores(request: Request, num_new: int) -> ScoreInput | None:
    """The tokens of the prompt that a step with `num_new` tokens of the request has to score: those without a score
    yet. A preempted request computes scored tokens again."""
    num_top = request.sampling_params.prompt_logprobs
    if num_top is None or not request.num_unscored_tokens:
        return None
    start = request.num_computed_tokens
    first = max(start + 1, request.num_prompt_tokens - request.num_unscored_tokens)
    token_ids = request.token_ids[first : min(start + num_new + 1, request.num_prompt_tokens)]
    return ScoreInput(start=first - 1 - start, token_ids=token_ids, num_top=num_top) if token_ids else None
