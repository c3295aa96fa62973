"""Workers behind one DNS name: each of its addresses is one of them (a headless Service, a round-robin record)."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable

from router.fleet.discovery.base import Found

log = logging.getLogger(__name__)

INTERVAL_S = 5.0
# These errors mean that the name has no address now. All others mean that no resolver could answer.
_NO_ADDRESS = {socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)}

Lookup = Callable[[str, int], Awaitable[list[str]]]
"""Addresses of a name, as `host:port`. Raises `socket.gaierror`."""


async def lookup(name: str, port: int) -> list[str]:
    infos = await asyncio.get_running_loop().getaddrinfo(name, port, type=socket.SOCK_STREAM)
    hosts = {str(info[4][0]): info[0] for info in infos}
    return [f"[{host}]:{port}" if family == socket.AF_INET6 else f"{host}:{port}" for host, family in hosts.items()]


class Dns:
    def __init__(self, name: str, port: int, *, interval_s: float = INTERVAL_S, look_up: Lookup = lookup) -> None:
        self._name = name
        self._port = port
        self._interval_s = interval_s
        self._look_up = look_up
        self.complete = False

    async def watch(self) -> AsyncGenerator[tuple[Found, ...], None]:
        known: tuple[Found, ...] | None = None
        problem = ""
        while True:
            current: tuple[Found, ...] | None
            try:
                current = tuple(sorted(Found(address) for address in await self._look_up(self._name, self._port)))
                reason = ""
            except socket.gaierror as error:
                current = () if error.errno in _NO_ADDRESS else None
                reason = str(error)
            if reason not in ("", problem):
                log.warning("a name was not resolved", extra={"endpoint": self._name, "reason": reason})
            problem = reason
            if current is not None and current != known:
                known = current
                self.complete = True
                yield current
            await asyncio.sleep(self._interval_s)
