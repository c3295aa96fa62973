"""What one request's parameters and past tokens do to its next logits.

Kept from token to token, so that a step costs what is new since the last one, however long the prompt is. No torch
here: the arrays are read by the sampler, without a copy.
"""

from __future__ import annotations

import copy
from array import array
from collections.abc import Iterable, Sequence

from common.sampling import SamplingParams


class LogitChanges:
    """Bias, bans, and the distinct tokens that penalties count. Made once for each request that asks for any."""

    __slots__ = (
        "_bad_words",
        "_num_seen",
        "_places",
        "allowed_ids",
        "bad_ids",
        "banned_ids",
        "bias",
        "bias_ids",
        "counts",
        "params",
        "seen_ids",
    )

    def __init__(
        self, params: SamplingParams, prompt_token_ids: Iterable[int] = (), eos_token_ids: Iterable[int] = ()
    ) -> None:
        self.params = params
        self.bias_ids = array("q", params.logit_bias)
        self.bias = array("f", params.logit_bias.values())
        eos = () if params.ignore_eos else eos_token_ids
        # Tokens that would end the answer; they are banned below min_tokens only.
        self.banned_ids = array("q", sorted({*eos, *params.stop_token_ids}) if params.min_tokens else ())
        self.allowed_ids = array("q", sorted(set(params.allowed_token_ids)))  # none: any token
        self._bad_words = [(list(one.token_ids[:-1]), one.token_ids[-1]) for one in params.bad_words_ids]
        self.bad_ids = array("q")  # tokens that would complete one of them now
        # Repetition counts the prompt too (arXiv 1909.05858), presence and frequency the output only.
        prompt = prompt_token_ids if params.repetition_penalty != 1 else ()
        self._places = {token_id: place for place, token_id in enumerate(dict.fromkeys(prompt))}
        self.seen_ids = array("q", self._places)
        self.counts = array("f", bytes(4 * len(self._places)))  # times in the output
        self._num_seen = 0

    def fork(self) -> LogitChanges:
        """Another answer's, that has the same tokens so far."""
        if not self._bad_words and not self.params.has_penalties:
            return self  # nothing in it depends on tokens
        other = copy.copy(self)
        other._places = dict(self._places)
        other.seen_ids, other.counts = self.seen_ids[:], self.counts[:]
        return other

    def follow(self, token_ids: Sequence[int], num_prompt_tokens: int) -> None:
        """Counts the output tokens that came since the last call. `token_ids`: prompt, then output."""
        if self._bad_words:
            output = token_ids[num_prompt_tokens:]
            ends = (last for start, last in self._bad_words if output[len(output) - len(start) :] == start)
            self.bad_ids = array("q", sorted(set(ends)))
        if not self.params.has_penalties:
            return
        for token_id in token_ids[num_prompt_tokens + self._num_seen :]:
            place = self._places.setdefault(token_id, len(self._places))
            if place == len(self.seen_ids):
                self.seen_ids.append(token_id)
                self.counts.append(0.0)
            self.counts[place] += 1
            self._num_seen += 1
