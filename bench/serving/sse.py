"""The body of an HTTP answer, taken apart as it comes: chunks of the transfer, then server-sent events."""

from __future__ import annotations

from collections.abc import Iterator

from common.errors import InternalError


class Chunks:
    """Takes `Transfer-Encoding: chunked` apart. `is_done` after the last chunk and its trailers."""

    def __init__(self) -> None:
        self._left = b""
        self._is_last = False  # what follows are trailers
        self.is_done = False

    def feed(self, data: bytes) -> bytes:
        """The content of the chunks that are whole now. Raises `InternalError` for what is no chunk."""
        left = self._left + data
        found: list[bytes] = []
        at = 0
        while not self.is_done:
            end = left.find(b"\r\n", at)
            if end < 0:
                break
            if self._is_last:
                self.is_done = end == at
                at = end + 2
                continue
            try:
                size = int(left[at:end].partition(b";")[0], 16)
            except ValueError as error:
                raise InternalError(f"a chunk of the answer begins with {left[at:end][:40]!r}") from error
            if size == 0:
                self._is_last = True
                at = end + 2
                continue
            if len(left) < end + 2 + size + 2:
                break
            found.append(left[end + 2 : end + 2 + size])
            at = end + 2 + size + 2
        self._left = left[at:]
        return b"".join(found)


class Events:
    """The `data` of server-sent events; comments and other fields are left out."""

    def __init__(self) -> None:
        self._left = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Of each event that is whole now."""
        *whole, self._left = (self._left + data).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in whole:
            lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
            if lines:
                yield b"\n".join(lines)
