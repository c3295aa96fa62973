"""Which rows of a model's head are tokens, and which of these end an answer."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence

import torch

log = logging.getLogger(__name__)


def known_ends(ends: Mapping[int, str], vocab_size: int) -> list[int]:
    """The ids that end an answer, of those that files name (`ModelFiles.ends`). Logs which they are and who names them.
    An id that the model's head does not have ends nothing."""
    known = [token_id for token_id in ends if 0 <= token_id < vocab_size]
    if len(known) < len(ends):
        outside = {token_id: name for token_id, name in ends.items() if token_id not in known}
        log.warning("ends of an answer outside the model's vocabulary are ignored", extra={"ends": _listed(outside)})
    log.info("tokens that end an answer", extra={"ends": _listed({each: ends[each] for each in known}) or "none"})
    return known


def _listed(ends: Mapping[int, str]) -> str:
    return "; ".join(f"{token_id} of {name}" for token_id, name in ends.items())


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
