"""How one request's parameters and past tokens change its next logits.

Kept from token to token, so that a step costs what is new since the last one, however long the prompt is. `edits` gives
the changes of one token by value.
"""

from __future__ import annotations

import copy
from array import array
from collections.abc import Iterable, Sequence

from common.sampling import SamplingParams
from engine.step import LogitEdits, no_ids


class LogitChanges:
    """Bias, bans, and the distinct tokens that penalties count. Made once for each request that asks for any."""

    __slots__ = (
        "_long_words",
        "_num_seen",
        "_places",
        "_single_words",
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
        words = [one.token_ids for one in params.bad_words_ids]
        self._single_words = {word[0] for word in words if len(word) == 1}
        self._long_words: dict[int, list[tuple[int, ...]]] = {}  # by the last token but one
        for word in words:
            if len(word) > 1:
                self._long_words.setdefault(word[-2], []).append(word)
        self.bad_ids = array("q", sorted(self._single_words))  # tokens that would complete a bad word now
        # Repetition counts the prompt too (arXiv 1909.05858), presence and frequency the output only.
        prompt = prompt_token_ids if params.repetition_penalty != 1 else ()
        self._places = {token_id: place for place, token_id in enumerate(dict.fromkeys(prompt))}
        self.seen_ids = array("q", self._places)
        self.counts = array("f", bytes(4 * len(self._places)))  # times in the output
        self._num_seen = 0

    def fork(self) -> LogitChanges:
        """Another answer's, that has the same tokens so far."""
        if not self._long_words and not self.params.has_penalties:
            return self  # nothing in it depends on tokens
        other = copy.copy(self)
        other._places = dict(self._places)
        other.seen_ids, other.counts = self.seen_ids[:], self.counts[:]
        return other

    def follow(self, token_ids: Sequence[int], num_prompt_tokens: int) -> None:
        """Counts the output tokens that came since the last call. `token_ids`: prompt, then output."""
        if self._long_words:
            last = token_ids[-1] if len(token_ids) > num_prompt_tokens else -1
            ends = {
                word[-1]
                for word in self._long_words.get(last, ())
                if tuple(token_ids[max(num_prompt_tokens, len(token_ids) + 1 - len(word)) :]) == word[:-1]
            }
            self.bad_ids = array("q", sorted(self._single_words | ends))
        if not self.params.has_penalties:
            return
        for token_id in token_ids[num_prompt_tokens + self._num_seen :]:
            place = self._places.setdefault(token_id, len(self._places))
            if place == len(self.seen_ids):
                self.seen_ids.append(token_id)
                self.counts.append(0.0)
            self.counts[place] += 1
            self._num_seen += 1

    def edits(self, num_output_tokens: int) -> LogitEdits:
        """The changes for the token after so many of the answer. What grows with later tokens is copied."""
        params, has_penalties = self.params, self.params.has_penalties
        return LogitEdits(
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            seen_ids=self.seen_ids[:] if has_penalties else self.seen_ids,
            counts=self.counts[:] if has_penalties else self.counts,
            bias_ids=self.bias_ids,
            bias=self.bias,
            allowed_ids=self.allowed_ids,
            banned_ids=self.banned_ids if num_output_tokens < params.min_tokens else no_ids(),
            bad_ids=self.bad_ids,
        )
