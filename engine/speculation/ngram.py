"""Prompt lookup: guesses that the answer goes on as the text went on after an earlier occurrence of the answer's last
tokens.

(Saxena, "Prompt Lookup Decoding", 2023.)
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping

import numpy as np

from engine.request import Request

MIN_LENGTH = 2  # tokens that have to be the same
MAX_LENGTH = 6  # further ones do not count


class NgramDrafter:
    cost = 0.0

    def draft(self, lengths: Mapping[Request, int]) -> dict[Request, list[int]]:
        drafts = {}
        for request, length in lengths.items():
            known = request.drafts.token_ids
            known.extend(request.token_ids[len(known) :])
            drafts[request] = continuation(known, length)
        return drafts


def continuation(token_ids: array[int], num_tokens: int) -> list[int]:
    """A guess of the next `num_tokens` tokens, or none. Takes the earlier place with the longest equal end (up to
    `MAX_LENGTH` tokens), and of equally long ones the latest. If the text repeats a part shorter than `num_tokens`, the
    guess goes on repeating it."""
    size = len(token_ids)
    if size <= MIN_LENGTH:
        return []
    known = np.frombuffer(token_ids, dtype=np.int32)
    ends = np.flatnonzero(known[:-1] == known[-1])  # places of the last token
    length = 1
    while length < MAX_LENGTH and len(ends):
        longer = ends[ends >= length]
        longer = longer[known[longer - length] == known[size - 1 - length]] if length < size else longer[:0]
        if not len(longer):
            break
        ends, length = longer, length + 1
    if not len(ends) or length < MIN_LENGTH:
        return []
    start = int(ends[-1]) + 1
    period = size - start
    return [token_ids[start + index % period] for index in range(num_tokens)]
