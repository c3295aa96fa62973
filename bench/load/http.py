"""HTTP/1.1 for all benchmarks: kept connections, and no more work for an answer than its bytes need."""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

from common.errors import InternalError

READ_BYTES = 2**18
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(slots=True, frozen=True)
class Head:
    status: int
    phrase: str  # that goes with the status
    fields: Mapping[str, str]  # names in small letters

    @property
    def length(self) -> int | None:
        """Bytes of the body; None if it is chunked, or ends with the connection."""
        return int(self.fields["content-length"]) if "content-length" in self.fields else None


def request(method: str, path: str, body: bytes = b"", *, api_key: str = "", host: str = "bench") -> bytes:
    """A whole request; `body` is JSON."""
    fields = {"Host": host, "User-Agent": "baton-bench"}
    if api_key:
        fields["Authorization"] = f"Bearer {api_key}"
    if body:
        fields |= {"Content-Type": "application/json", "Content-Length": str(len(body))}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + body


class HttpConnections:
    """As many connections to one server as there are requests at a time, kept open. The one that was idle longest is
    taken first, so that each is used before the server closes it for being idle."""

    def __init__(self, url: str, tls: ssl.SSLContext | None = None) -> None:
        """With `tls`, connections are of TLS."""
        parts = urlsplit(url)
        self._address = (parts.hostname, parts.port or (80 if tls is None else 443))
        self._tls = tls
        self._idle: deque[Connection] = deque()

    @asynccontextmanager
    async def asked(self, request: bytes) -> AsyncIterator[tuple[Head, asyncio.StreamReader]]:
        """Sends `request`. Gives the answer's head, and the stream from which its body has to be read to its end.

        The request is sent once more, on a new connection, if a kept one is closed before a byte of the answer came:
        the server closed it before the request was there. Raises `InternalError` if the server takes no connection,
        `OSError` and `EOFError` if one breaks."""
        connection, head = await self._ask(request)
        try:
            yield head, connection[0]
        except BaseException:
            connection[1].close()
            raise
        if connection[0].at_eof():
            connection[1].close()
        else:
            self._idle.append(connection)

    async def whole(self, request: bytes) -> tuple[Head, bytes]:
        """Sends `request`, and returns the answer's head and body. Raises `InternalError` if there is none."""
        try:
            async with self.asked(request) as (head, reader):
                return head, b"".join([piece async for piece in content(head, reader)])
        except (EOFError, OSError) as error:
            raise InternalError(f"the answer was cut off: {error}") from error

    async def _ask(self, request: bytes) -> tuple[Connection, Head]:
        if self._idle:
            kept = self._idle.popleft()
            try:
                return kept, await _head(kept, request)
            except (asyncio.IncompleteReadError, ConnectionError) as error:
                kept[1].close()
                if isinstance(error, asyncio.IncompleteReadError) and error.partial:
                    raise
            except BaseException:
                kept[1].close()
                raise
        try:
            opened = await asyncio.open_connection(*self._address, ssl=self._tls)
        except OSError as error:
            raise InternalError(f"the server takes no connection: {error}") from error
        try:
            return opened, await _head(opened, request)
        except BaseException:
            opened[1].close()
            raise

    def close(self) -> None:
        """Closes the idle ones; call it when nothing is asked any more."""
        while self._idle:
            self._idle.popleft()[1].close()


async def _head(connection: Connection, request: bytes) -> Head:
    reader, writer = connection
    writer.write(request)
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").strip().split("\r\n")
    _, status, phrase = f"{first} ".split(" ", 2)
    fields = (line.partition(":") for line in lines)
    if not first.startswith("HTTP/1.1 "):
        raise ConnectionError(f"the answer begins with {first!r}")
    return Head(int(status), phrase.strip(), {name.lower(): value.strip() for name, _, value in fields})


async def content(head: Head, reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """The body of an answer, in pieces as they come, to its end. Raises `EOFError` if it is cut off, and
    `InternalError`."""
    if "chunked" in head.fields.get("transfer-encoding", "").lower():
        chunks = Chunks()
        while not chunks.is_done:
            if piece := chunks.feed(await _some(reader)):
                yield piece
    elif head.length is not None:
        left = head.length
        while left:
            piece = await _some(reader, left)
            left -= len(piece)
            yield piece
    else:  # the body ends with the connection
        while piece := await reader.read(READ_BYTES):
            yield piece


async def _some(reader: asyncio.StreamReader, most: int = READ_BYTES) -> bytes:
    piece = await reader.read(min(most, READ_BYTES))
    if not piece:
        raise EOFError("the connection was closed")
    return piece


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
