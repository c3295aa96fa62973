"""Channels of a decode worker to prefill workers, of which ever new ones come: those that nobody uses are closed."""

from __future__ import annotations

import asyncio
from typing import cast

import grpc

from common.grpc.transport import Channels
from worker.channels import IDLE_S, ChannelPool


class FakeChannel:
    def __init__(self, address: str) -> None:
        self.address = address
        self.is_open = True

    async def close(self) -> None:
        await asyncio.sleep(0)
        self.is_open = False


class FakeChannels:
    """Knows every channel that was opened; `version` is that of the certificates."""

    def __init__(self) -> None:
        self.version = 0
        self.made: list[FakeChannel] = []

    def open(self, address: str) -> grpc.aio.Channel:
        self.made.append(FakeChannel(address))
        return cast("grpc.aio.Channel", self.made[-1])

    async def open_ones(self) -> list[str]:
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return [channel.address for channel in self.made if channel.is_open]


def pool(opened_by: FakeChannels) -> tuple[ChannelPool, list[float]]:
    now = [0.0]
    return ChannelPool(cast("Channels", opened_by), clock=lambda: now[0]), now


async def test_one_channel_serves_all_calls_to_an_address() -> None:
    opened_by = FakeChannels()
    channels, _ = pool(opened_by)
    with channels.calling("a") as first, channels.calling("a") as second, channels.calling("b"):
        assert first is second
    with channels.calling("a") as third:
        assert third is first
    assert await opened_by.open_ones() == ["a", "b"]
    await channels.close()
    assert await opened_by.open_ones() == []


async def test_workers_that_come_and_go_leave_no_channels() -> None:
    opened_by = FakeChannels()
    channels, now = pool(opened_by)
    with channels.calling("stays"):
        for number in range(50):
            with channels.calling(f"pod-{number}"):
                pass
            now[0] += IDLE_S / 2
        assert len(opened_by.made) == 51
        # One that has a call is in use for as long as that takes.
        assert await opened_by.open_ones() == ["stays", "pod-48", "pod-49"]
    now[0] += IDLE_S
    with channels.calling("another"):
        assert await opened_by.open_ones() == ["another"]
    await channels.close()


async def test_a_channel_with_former_certificates_is_closed_after_its_last_call() -> None:
    opened_by = FakeChannels()
    channels, _ = pool(opened_by)
    with channels.calling("b"):
        pass
    with channels.calling("a") as former:
        opened_by.version = 1
        with channels.calling("a") as current:
            assert current is not former
            assert await opened_by.open_ones() == ["a", "a"]  # b's has no call
        assert cast("FakeChannel", former).is_open
    assert await opened_by.open_ones() == ["a"]
    assert cast("FakeChannel", current).is_open
    await channels.close()
    assert await opened_by.open_ones() == []
