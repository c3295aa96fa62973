"""Where the tokens of an answer begin in its text, in characters."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

CONTINUATION = range(0x80, 0xC0)  # bytes that are not the first of their character, in UTF-8


class TextOffsets:
    """Counts the characters of one text. A token that is a later part of a character begins where that character
    does."""

    def __init__(self, num_chars: int = 0, before: bytes = b"") -> None:
        """`num_chars`: characters before the first token. `before`: the bytes before it, which may end in the middle of
        a character; if they do, its other bytes are tokens of this text."""
        self._num_chars = num_chars
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._decoder.decode(before)

    def add(self, tokens: Iterable[bytes]) -> list[int]:
        """The offset of each of these further tokens; `tokens`: what each stands for."""
        found = []
        for data in tokens:
            unfinished = self._decoder.getstate()[0]
            is_broken = bool(unfinished and data) and data[0] not in CONTINUATION  # that is a replacement character
            found.append(self._num_chars + is_broken)
            self._num_chars += len(self._decoder.decode(data))
        return found
