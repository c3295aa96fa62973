"""gRPC channels to other workers: one for each address, opened at the first call and closed when unused."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import grpc

from common.grpc.transport import Channels

IDLE_S = 300.0  # without a call: its worker may be gone for good, as pods that come and go have ever new addresses


@dataclass(slots=True, eq=False)
class _Opened:
    address: str
    channel: grpc.aio.Channel
    used_at: float
    num_calls: int = 0


class ChannelPool:
    def __init__(self, channels: Channels, clock: Callable[[], float] = time.monotonic) -> None:
        self._opened_by = channels
        self._version = channels.version  # of the certificates that current ones show
        self._clock = clock
        self._current: dict[str, _Opened] = {}
        self._all: set[_Opened] = set()
        self._closing: set[asyncio.Task[None]] = set()

    @contextlib.contextmanager
    def calling(self, address: str) -> Iterator[grpc.aio.Channel]:
        """The channel for one call. After a change of certificates calls get a new channel, and the former one is
        closed after its last call. Channels without a call for IDLE_S are closed, too."""
        if (version := self._opened_by.version) != self._version:
            self._version = version
            self._current.clear()
        opened = self._current.get(address)
        if opened is None:
            opened = self._current[address] = _Opened(address, self._opened_by.open(address), self._clock())
            self._all.add(opened)
        opened.num_calls += 1
        self._close_unused()
        try:
            yield opened.channel
        finally:
            opened.num_calls -= 1
            opened.used_at = self._clock()
            self._close_unused()

    def _close_unused(self) -> None:
        idle_since = self._clock() - IDLE_S
        for opened in [opened for opened in self._all if not opened.num_calls]:
            is_current = self._current.get(opened.address) is opened
            if is_current and opened.used_at > idle_since:
                continue
            self._all.discard(opened)
            if is_current:
                del self._current[opened.address]
            closing = asyncio.get_running_loop().create_task(opened.channel.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        for opened in self._all:
            await opened.channel.close()
        self._all.clear()
        self._current.clear()
        await asyncio.gather(*self._closing, return_exceptions=True)
