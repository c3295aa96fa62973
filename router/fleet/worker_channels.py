"""The channels to a router's workers: opened, renewed when certificates change, closed when nothing runs on them."""

from __future__ import annotations

import asyncio

import grpc

from common.grpc.transport import Channels
from router.fleet.worker import WorkerRecord


class WorkerChannels:
    def __init__(self, channels: Channels) -> None:
        self._channels = channels
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def version(self) -> int:
        """The version of the certificates that new channels show."""
        return self._channels.version

    def open(self, address: str) -> grpc.aio.Channel:
        return self._channels.open(address)

    def renew(self, worker: WorkerRecord) -> None:
        """Call before the worker is connected anew: a channel goes on showing the certificate with which it was
        opened."""
        if self.version != worker.channel_version:
            self.close_when_idle(worker)
            worker.channel_version = self.version
            worker.channel = self.open(worker.address)

    def close_when_idle(self, worker: WorkerRecord) -> None:
        """Closes the channel that `worker` has now, once the requests that run now have ended."""
        channel, running = worker.channel, set(worker.running)

        async def close() -> None:
            try:
                while running & worker.running:  # noqa: ASYNC110 (nothing waits for this)
                    await asyncio.sleep(1.0)
            finally:
                await channel.close()

        closing = asyncio.create_task(close(), name=f"close {worker.address}")
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Closes at once those that wait for requests to end."""
        closing = list(self._closing)
        for task in closing:
            task.cancel()
        await asyncio.gather(*closing, return_exceptions=True)
