"""JSON that is large because of a few lists: their entries become bytes as they come, and go out in parts.

The end of a long answer then costs little, and the bytes take a fifth of the memory of what they are made of.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from router.api.rest.openai.tools import JsonObject

PART_BYTES = 256 * 2**10
_MARK = b"\0"  # where a list's entries come: JSON has no such byte, as texts have it escaped


class JsonList:
    """A list of JSON values that grows. `json_parts` writes it."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def add(self, values: Sequence[object]) -> int:
        """Returns how many bytes they take."""
        if not values:
            return 0
        piece = msgspec.json.encode(values)[1:-1]  # without its brackets
        self._pieces.append(piece)
        return len(piece)

    def __iter__(self) -> Iterator[bytes]:
        for index, piece in enumerate(self._pieces):
            if index:
                yield b","
            yield piece


def json_parts(content: JsonObject, before: bytes = b"", after: bytes = b"") -> Iterator[bytes]:
    """The bytes of `content`, which may have a `JsonList` anywhere, between `before` and `after`. Each part but the
    last has PART_BYTES at least, and little more."""
    lists: list[JsonList] = []

    def mark(value: object) -> msgspec.Raw:
        if not isinstance(value, JsonList):
            raise NotImplementedError(type(value).__name__)
        lists.append(value)
        return msgspec.Raw(b"[" + _MARK + b"]")

    around = (before + msgspec.json.encode(content, enc_hook=mark) + after).split(_MARK)
    return in_parts(_pieces(around, lists))


def _pieces(around: Sequence[bytes], lists: Sequence[JsonList]) -> Iterator[bytes]:
    yield around[0]
    for entries, text in zip(lists, around[1:], strict=True):
        yield from entries
        yield text


def in_parts(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Joins small ones. Each part but the last has PART_BYTES at least."""
    part: list[bytes] = []
    size = 0
    for piece in pieces:
        part.append(piece)
        size += len(piece)
        if size >= PART_BYTES:
            yield b"".join(part)
            part, size = [], 0
    if size:
        yield b"".join(part)
