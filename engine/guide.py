"""Where one guided answer is in its grammar, and which tokens may come next."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from llguidance import LLExecutor, LLMatcher, LLTokenizer

from engine.device_copies import to_device
from engine.guide_state import GuideError


class Guide:
    """`GuideState`, on llguidance's matcher."""

    def __init__(self, matcher: LLMatcher, tokenizer: LLTokenizer) -> None:
        """`matcher` is at the beginning, and this guide's own. `tokenizer` is the one that it was made with."""
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
        new = list(token_ids[num_prompt_tokens + self._num_seen :])
        if new and not self.matcher.consume_tokens(new):
            raise GuideError(f"the answer so far is not in its grammar: {self.failure}")
        self._num_seen += len(new)
        end = self._next_forced + len(new)
        if tuple(new) == self._forced[self._next_forced : end]:
            self._next_forced = end
        else:
            self._forced, self._next_forced = (), 0

    def allows(self, token_id: int) -> bool:
        """Whether the grammar allows this token, without the cost of a mask. False may be wrong for an end token: only
        the mask tells."""
        forced = self.forced()
        if self.matcher.is_error():
            return False
        return self._takes(token_id) if forced is None else forced == token_id

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
        if not self.matcher.is_error():
            return ""
        return " ".join(self.matcher.get_error().partition("<state>")[0].split())[:500]


def make_masks(guides: Sequence[Guide]) -> torch.Tensor:
    """`[num_guides, bytes]` uint8: a bit for each token that may come next, lowest first, in whole words of 32; none if
    the grammar has failed. All masks are made in parallel."""
    masks = torch.zeros(len(guides), -(-guides[0].tokenizer.vocab_size // 32) * 4, dtype=torch.uint8)
    free = []
    for index, guide in enumerate(guides):
        if (token := guide.forced()) is None:
            free.append((guide.matcher, index))
        else:
            masks[index, token // 8] = 1 << token % 8
    if free:
        _executor().unsafe_compute_mask_ptr(free, masks.data_ptr(), masks.shape[1], len(guides))
    for index, guide in enumerate(guides):
        if guide.failure:  # its mask would end the answer as if it were whole
            masks[index] = 0
    return masks


def mask_logits(logits: torch.Tensor, rows: Sequence[int], masks: torch.Tensor) -> None:
    """Writes minus infinity for tokens that the grammars of these rows do not allow, in place and in one pass.

    `logits` `[num_rows, vocab_size]` float32, maybe fewer columns than the tokenizer has tokens. `masks` has one for
    each of `rows`.
    """
    if logits.device.type == "cpu":  # row by row, each within the processor's cache
        table, allowed, values = _addends(logits.device).numpy(), masks.numpy(), logits.numpy()
        for index, row in enumerate(rows):
            values[row] += table.take(allowed[index], axis=0).reshape(-1)[: logits.shape[-1]]
        return
    addends = _addends(logits.device)[to_device(masks, logits.device).int()].view(len(rows), -1)
    logits[to_device(rows, logits.device)] += addends[:, : logits.shape[-1]]


@cache
def _addends(device: torch.device) -> torch.Tensor:
    """`[256, 8]` float32: what each byte of a mask adds to the logits of its eight tokens, lowest bit first."""
    bits = (torch.arange(256)[:, None] >> torch.arange(8)) & 1
    return to_device(torch.zeros(256, 8).masked_fill(bits == 0, float("-inf")), device)


@cache
def _executor() -> LLExecutor:
    # Some tens of microseconds a mask: more threads wait for each other longer than they save.
    return LLExecutor(num_threads=max(1, torch.get_num_threads() // 2))
