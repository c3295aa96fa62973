"""Which rows of a model's head are tokens."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch


class Padding:
    """The rows of a head that are no tokens: models pad their vocabulary to a round number. They are never drawn."""

    def __init__(self, token_ids: Collection[int], vocab_size: int, device: torch.device) -> None:
        """`token_ids`: all of the tokenizer; nothing is padding if they are not known."""
        self._ids = frozenset(range(vocab_size)).difference(token_ids) if token_ids else frozenset()
        self._index = torch.tensor(sorted(self._ids), dtype=torch.long, device=device)

    def mask(self, logits: torch.Tensor) -> torch.Tensor:
        """`logits` `[num_rows, vocab_size]`, changed in place: -inf in each such row of the head."""
        return logits.index_fill_(1, self._index, float("-inf")) if self._ids else logits

    def has_any_of(self, token_ids: Sequence[float]) -> bool:
        return not self._ids.isdisjoint(token_ids)
