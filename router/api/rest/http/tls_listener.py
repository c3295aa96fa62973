"""Accepts TLS connections. A handshake counts as an idle connection and has a time limit: the event loop's own servers
hold as many that never finish as clients begin.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable

from router.api.rest.http.protocol import Connections, LimitedProtocol

log = logging.getLogger(__name__)

SHUTDOWN_S = 1.0  # for a peer to say that it closes, too: a closing connection has no place of its own
RETRY_S = 0.5  # after an accept that failed, as for want of a file descriptor


class _Handshake:
    """One connection before it speaks HTTP."""

    def __init__(self, limits: Connections, connection: socket.socket) -> None:
        self._limits = limits
        self._connection = connection
        self._has_begun = False
        self._is_counted = True
        limits.num += 1
        limits.idle[self] = None
        self.task: asyncio.Task[None] | None = None

    def uncount(self) -> None:
        self._limits.idle.pop(self, None)
        if self._is_counted:
            self._is_counted = False
            self._limits.num -= 1

    def give_way(self) -> None:
        self.uncount()
        if self.task is not None:
            self.task.cancel()
        if not self._has_begun:  # else the event loop closes it
            self._connection.close()

    async def run(self, context: ssl.SSLContext, make: Callable[[], LimitedProtocol]) -> None:
        self._has_begun = True
        protocol = make()
        protocol.before_made = self.uncount  # its own place takes over
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: protocol,
                self._connection,
                ssl=context,
                ssl_handshake_timeout=self._limits.head_timeout_s,
                ssl_shutdown_timeout=SHUTDOWN_S,
            )
        except OSError as error:  # late, gone, or no TLS; ssl.SSLError is one
            log.debug("a TLS handshake failed", extra={"reason": str(error)})
        finally:
            self.uncount()


async def accept_tls(
    listener: socket.socket, limits: Connections, context: ssl.SSLContext, make: Callable[[], LimitedProtocol]
) -> None:
    """Accepts connections until cancelled. `make` makes a connection's protocol."""
    loop = asyncio.get_running_loop()
    tasks: set[asyncio.Task[None]] = set()
    try:
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError as error:
                log.warning("a connection could not be accepted", extra={"reason": str(error)})
                await asyncio.sleep(RETRY_S)
                continue
            if not limits.has_room():
                connection.close()
                continue
            handshake = _Handshake(limits, connection)
            handshake.task = asyncio.create_task(handshake.run(context, make))
            tasks.add(handshake.task)
            handshake.task.add_done_callback(tasks.discard)
    finally:
        for task in tasks:
            task.cancel()
