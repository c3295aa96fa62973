"""The body of a streamed answer, taken apart as it comes."""

from __future__ import annotations

from collections.abc import Iterator


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
