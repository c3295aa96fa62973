"""Where one guided answer is in its grammar, and which tokens may come next."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer

from common.guided import failure_reason


class GuideError(Exception):
    """The answer cannot go on in its grammar; the reason is one line.

    Every worker would come to the same end, since a guide depends on the grammar and the tokens alone. Either the
    grammar takes too much work to follow, or it refuses a token that its own mask allowed; the matcher's message does
    not tell which.
    """


class Guide:
    """Where one answer is in its grammar. It follows from the answer's tokens alone, so that a request that continues
    elsewhere replays them there."""

    def __init__(self, matcher: LLMatcher, tokenizer: LLTokenizer, *, num_bytes: int = 0) -> None:
        """`matcher` is at the beginning, and this guide's own. `tokenizer` is the one that it was made with.
        `num_bytes`: memory that the grammar takes, about."""
        self.num_bytes = num_bytes
        self.matcher = matcher
        self.tokenizer = tokenizer
        self._num_seen = 0  # output tokens that the matcher has taken in
        # Tokens of a text that has to come, from `_next_forced` on. Finding them takes as long as the whole rest of the
        # text is, so they are found once and not for each token.
        self._forced: tuple[int, ...] = ()
        self._next_forced = 0

    def fork(self) -> Guide:
        """A guide for another answer, in the same place of the grammar."""
        guide = Guide(self.matcher.deep_copy(), self.tokenizer)
        guide._num_seen = self._num_seen
        guide._forced, guide._next_forced = self._forced, self._next_forced
        return guide

    def follow(self, token_ids: Sequence[int], num_prompt_tokens: int) -> None:
        """Takes in the output tokens that came since the last call. `token_ids`: prompt, then output.

        Raises `GuideError` if one of them is not in the grammar.
        """
        new = list(token_ids[num_prompt_tokens + self._num_seen :])
        if new and not self.matcher.consume_tokens(new):
            raise GuideError(f"the answer so far is not in its grammar: {self.failure}")
        self._num_seen += len(new)
        end = self._next_forced + len(new)
        if tuple(new) == self._forced[self._next_forced : end]:
            self._next_forced = end
        else:
            self._forced, self._next_forced = (), 0

    def forced(self) -> int | None:
        """The token that comes next if the grammar leaves only one text. (Shorter tokens of the same text would be in
        the grammar, too.)"""
        if self._next_forced == len(self._forced):
            self._forced, self._next_forced = tuple(self.matcher.compute_ff_tokens()), 0
            if not self._forced:
                return None
        token = self._forced[self._next_forced]
        if self._takes(token):
            return token
        # The text spells a special token but is plain text, so plain tokens have to write it.
        plain = self.tokenizer.greedy_tokenize(self.tokenizer.decode_bytes([token]).decode(errors="ignore"))
        if not plain or not self._takes(plain[0]):
            return None
        self._forced, self._next_forced = (*plain, *self._forced[self._next_forced + 1 :]), 0
        return plain[0]

    def _takes(self, token_id: int) -> bool:
        return self.matcher.validate_tokens([token_id]) == 1

    @property
    def failure(self) -> str:
        """Why no token is allowed; empty if one is. Known once the mask was made."""
        if not self.matcher.is_error():
            return ""
        return failure_reason(self.matcher.get_error())


def make_masks(guides: Sequence[Guide]) -> list[bytes]:
    """For each guide a bit for each token that may come next, lowest first, in whole words of 32; none if the grammar
    has failed. All masks are made in parallel. The guides are of one tokenizer."""
    size = -(-guides[0].tokenizer.vocab_size // 32) * 4
    masks = np.zeros((len(guides), size), np.uint8)
    free = []
    for index, guide in enumerate(guides):
        if (token := guide.forced()) is None:
            free.append((guide.matcher, index))
        else:
            masks[index, token // 8] = 1 << token % 8
    if free:
        _executor().unsafe_compute_mask_ptr(free, masks.ctypes.data, size, len(guides))
    for index, guide in enumerate(guides):
        if guide.failure:  # its mask would end the answer as if it were whole
            masks[index] = 0
    return [mask.tobytes() for mask in masks]


@cache
def _executor() -> LLExecutor:
    # Some tens of microseconds a mask: more threads wait for each other longer than they save.
    return LLExecutor(num_threads=max(1, len(os.sched_getaffinity(0)) // 2))
