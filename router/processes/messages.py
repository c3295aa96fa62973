"""Messages between the parent and one of its processes, over a pair of sockets that ends with either of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import msgspec

log = logging.getLogger(__name__)

HEAD_BYTES = 4
MAX_UNREAD_BYTES = 16 * 2**20  # of messages that the other end leaves unread: one that reads has far less


class Beat(msgspec.Struct, tag=True):
    """A sign of life, once a second. A process gives them from when it listens, and one at once when it can serve; its
    parent gives them from when it has started the process, and its own are always `is_ready`."""

    is_ready: bool


class Failed(msgspec.Struct, tag=True):
    """The process ends, for this reason."""

    reason: str


class Enter(msgspec.Struct, tag=True):
    """A request wants a place in the queue (`RequestQueue.place`)."""

    number: int
    tenant: str
    cost: float
    left_s: float
    priority: int
    weight: float
    request_priority: int
    places: int


class Placed(msgspec.Struct, tag=True):
    number: int


class Refused(msgspec.Struct, tag=True):
    """The request gets no place. `retry_after_s` is None if the request's own deadline passed while it waited."""

    number: int
    reason: str
    retry_after_s: float | None


class Leave(msgspec.Struct, tag=True):
    """The request does not need its place any more, or does not wait for one any more."""

    number: int


class QueueLimits(msgspec.Struct, tag=True):
    """New bounds of the queue, from the settings file."""

    max_running: int | None
    max_waiting: int
    max_wait_s: float


class ShowDebug(msgspec.Struct, tag=True):
    """Whether the process shows debug lines (`common.logs`), as its parent does."""

    is_on: bool


class OrderLevel(msgspec.Struct, tag=True):
    """Which log lines all processes show from now on (`common.logs`): from one process to the parent, and from that to
    each process, also to one that starts later."""

    level: str


class Ask(msgspec.Struct, tag=True):
    """A query to all processes of the router. One of them asks the parent, which asks each."""

    number: int
    what: str
    limit: int = 0
    tenant: str | None = None
    which: str = ""


class Reply(msgspec.Struct, tag=True):
    """The answer of each process to the parent, and then all answers together, from the parent to the process that
    asked."""

    number: int
    contents: list[bytes]


Message = Beat | Failed | Enter | Placed | Refused | Leave | QueueLimits | ShowDebug | OrderLevel | Ask | Reply
_DECODER = msgspec.msgpack.Decoder(Message)


class Link:
    """One end of the connection between the parent and a process."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, max_unread_bytes: int = MAX_UNREAD_BYTES
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._max_unread_bytes = max_unread_bytes

    def send(self, message: Message) -> None:
        """Sends a message, which is lost if the other end is gone; then `messages` ends.

        An end that does not read for a long time is as good as gone: what it is sent would grow without end.
        """
        unread = self._writer.transport.get_write_buffer_size()
        if unread > self._max_unread_bytes:
            if not self._writer.transport.is_closing():
                log.error("a process of the router does not read what it is sent", extra={"bytes": unread})
            self._writer.transport.abort()
            return
        content = msgspec.msgpack.encode(message)
        self._writer.write(len(content).to_bytes(HEAD_BYTES, "big") + content)

    async def messages(self) -> AsyncIterator[Message]:
        """The other end's messages, until it is gone."""
        try:
            while True:
                head = await self._reader.readexactly(HEAD_BYTES)
                yield _DECODER.decode(await self._reader.readexactly(int.from_bytes(head, "big")))
        except (asyncio.IncompleteReadError, ConnectionError):
            return

    def close(self) -> None:
        self._writer.close()
