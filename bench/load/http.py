"""HTTP/1.1 for load generators: kept connections, and no more work for an answer than its bytes need."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

from common.errors import InternalError

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(slots=True, frozen=True)
class Head:
    status: int
    phrase: str  # that goes with the status
    fields: Mapping[str, str]  # names in small letters

    @property
    def length(self) -> int | None:
        """Bytes of the body; None if it is chunked."""
        return int(self.fields["content-length"]) if "content-length" in self.fields else None


def post(path: str, body: Mapping[str, object], api_key: str = "") -> bytes:
    """A whole request."""
    content = json.dumps(body).encode()
    key = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
    head = f"POST {path} HTTP/1.1\r\nHost: bench\r\n{key}Content-Length: {len(content)}\r\n"
    return f"{head}Content-Type: application/json\r\n\r\n".encode() + content


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
        self._idle.append(connection)

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
    return Head(int(status), phrase, {name.lower(): value.strip() for name, _, value in fields})
