"""gRPC channels to other workers, one for each address, made when first needed."""

from __future__ import annotations

import grpc

from common.grpc_transport import Channels


class ChannelPool:
    def __init__(self, channels: Channels) -> None:
        self._opened_by = channels
        self._version = channels.version
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._former: list[grpc.aio.Channel] = []  # with certificates of before; streams may still run on them

    def get(self, address: str) -> grpc.aio.Channel:
        """For one call, now. After a change of certificates it is a new one."""
        if (version := self._opened_by.version) != self._version:
            self._version = version
            self._former += self._channels.values()
            self._channels.clear()
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = self._opened_by.open(address)
        return channel

    async def close(self) -> None:
        for channel in [*self._channels.values(), *self._former]:
            await channel.close()
        self._channels.clear()
        self._former.clear()
