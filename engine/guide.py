"""Where one guided answer is in its grammar, and which tokens may come next."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache

import torch
from llguidance import LLExecutor, LLMatcher

from engine.batch import SampleInput
from engine.guide_state import GuideError


class Guide:
    """`GuideState`, on llguidance's matcher."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        """`matcher` is at the beginning, and this guide's own. `vocab_size` is its tokenizer's."""
        self.matcher = matcher
        self.vocab_size = vocab_size
        self._num_seen = 0  # output tokens that the matcher has taken in

    def fork(self) -> Guide:
        """Another answer's, that is where this one is now."""
        guide = Guide(self.matcher.deep_copy(), self.vocab_size)
        guide._num_seen = self._num_seen
        return guide

    def follow(self, token_ids: Sequence[int], num_prompt_tokens: int) -> None:
        new = list(token_ids[num_prompt_tokens + self._num_seen :])
        if new and not self.matcher.consume_tokens(new):
            raise GuideError(f"the answer so far is not in its grammar: {self.failure}")
        self._num_seen += len(new)

    @property
    def failure(self) -> str:
        if not self.matcher.is_error():
            return ""
        return " ".join(self.matcher.get_error().partition("<state>")[0].split())[:500]


def guides_of(inputs: Sequence[SampleInput]) -> list[Guide]:
    """Those of the guided rows, in their order."""
    return [item.guide for item in inputs if isinstance(item.guide, Guide)]


def begin_masks(inputs: Sequence[SampleInput]) -> Future[torch.Tensor] | None:
    """`make_masks` for `guides_of(inputs)` on a thread of its own, beside the forward pass: what may come next depends
    on the tokens so far, not on the logits. None if there are no guides. Until the masks are there, nobody may use
    these guides."""
    guides = guides_of(inputs)
    return _maker().submit(make_masks, guides) if guides else None


def make_masks(guides: Sequence[Guide]) -> torch.Tensor:
    """`[num_guides, bytes]` uint8: a bit for each token that may come next, lowest first, in whole words of 32; none if
    the grammar has failed. All masks are made in parallel."""
    masks = torch.zeros(len(guides), -(-guides[0].vocab_size // 32) * 4, dtype=torch.uint8)
    _executor().unsafe_compute_mask_ptr(
        [(guide.matcher, index) for index, guide in enumerate(guides)], masks.data_ptr(), masks.shape[1], len(guides)
    )
    for index, guide in enumerate(guides):
        if guide.failure:  # its mask would end the answer as if it were whole
            masks[index] = 0
    return masks


def mask_logits(logits: torch.Tensor, rows: Sequence[int], masks: torch.Tensor) -> None:
    """In place and in one pass: minus infinity for tokens that the grammars of these rows do not allow.

    `logits` `[num_rows, vocab_size]` float32, maybe fewer columns than the tokenizer has tokens. `masks` has one for
    each of `rows`.
    """
    if logits.device.type == "cpu":  # row by row, each within the processor's cache
        table, allowed, values = _addends().numpy(), masks.numpy(), logits.numpy()
        for index, row in enumerate(rows):
            values[row] += table.take(allowed[index], axis=0).reshape(-1)[: logits.shape[-1]]
        return
    addends = _addends().to(logits.device)[masks.to(logits.device).int()].view(len(rows), -1)
    logits[torch.tensor(rows, device=logits.device)] += addends[:, : logits.shape[-1]]


@cache
def _addends() -> torch.Tensor:
    """`[256, 8]` float32: what each byte of a mask adds to the logits of its eight tokens, lowest bit first."""
    bits = (torch.arange(256)[:, None] >> torch.arange(8)) & 1
    return torch.zeros(256, 8).masked_fill(bits == 0, float("-inf"))


@cache
def _maker() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="masks")


@cache
def _executor() -> LLExecutor:
    # Some tens of microseconds a mask: more threads wait for each other longer than they save.
    return LLExecutor(num_threads=max(1, torch.get_num_threads() // 2))
