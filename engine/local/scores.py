"""Logprobs of a prompt's own tokens: how likely the model finds each of them, given those before it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch

from common.types import SampledToken, TokenLogprob
from engine.device_copies import read, to_device
from engine.step import Scoring

MAX_LOGITS = 2**23  # at once, 32 MiB: a prompt's would be gigabytes


class Head(Protocol):
    vocab_size: int

    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...


def score_tokens(
    hidden: torch.Tensor, score: Scoring, model: Head, between_slices: Callable[[], None]
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
