"""The source of workers for each spelling of an endpoint.

| spelled                          | source                                                                    |
| `host:port`, `unix:path`         | this one, for ever                                                        |
| `dns:///name:port`               | every address of the name, looked up again and again                      |
| `k8s:///namespace/service:port`  | EndpointSlices of the Service, watched; the port by its name or number    |
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from common.errors import ConfigError
from router.fleet.discovery.base import Discovery, Found
from router.fleet.discovery.dns import Dns
from router.fleet.discovery.kubernetes import EndpointSlices

_DNS = re.compile(r"dns:///(?P<name>[^/:\s]+):(?P<port>\d+)")
_KUBERNETES = re.compile(r"k8s:///(?P<namespace>[a-z0-9-]*)/(?P<service>[a-z0-9.-]+):(?P<port>[a-z0-9-]+)")
_STATIC = re.compile(r"unix:\S+|(\[[0-9a-fA-F:.%]+\]|[^\s:/\[\]]+):(?P<port>\d+)")


def discover(endpoints: Sequence[str], *, key: str = "endpoints") -> Discovery:
    """One source for all `endpoints`. Raises `ConfigError`, naming `key`, for one that cannot be read."""
    static = [Found(text) for text in endpoints if "://" not in text]
    for found in static:
        match = _STATIC.fullmatch(found.address)
        if match is None or int(match["port"] or 1) not in range(1, 65536):
            raise ConfigError(
                key, f"{found.address!r} is not host:port, dns:///name:port or k8s:///namespace/service:port"
            )
    moving = [_source(text, key) for text in endpoints if "://" in text]
    return Merged(tuple(static), moving)


def is_static(endpoints: Sequence[str]) -> bool:
    return all("://" not in text for text in endpoints)


def _source(text: str, key: str) -> Discovery:
    if match := _DNS.fullmatch(text):
        if int(match["port"]) in range(1, 65536):
            return Dns(match["name"], int(match["port"]))
    elif match := _KUBERNETES.fullmatch(text):
        return EndpointSlices(match["namespace"], match["service"], match["port"])
    raise ConfigError(key, f"{text!r} is neither dns:///name:port nor k8s:///namespace/service:port")


class Merged:
    """The union of fixed addresses and of what several sources find."""

    def __init__(self, static: tuple[Found, ...], sources: Sequence[Discovery]) -> None:
        self._static = static
        self._sources = sources

    @property
    def complete(self) -> bool:
        return all(source.complete for source in self._sources)

    async def watch(self) -> AsyncGenerator[tuple[Found, ...], None]:
        found: dict[int, tuple[Found, ...]] = {-1: self._static}
        news: asyncio.Queue[None] = asyncio.Queue()

        async def follow(index: int, source: Discovery) -> None:
            async with aclosing(source.watch()) as sets:
                async for current in sets:
                    found[index] = current
                    news.put_nowait(None)

        tasks = [asyncio.create_task(follow(i, source)) for i, source in enumerate(self._sources)]
        for task in tasks:
            task.add_done_callback(lambda _: news.put_nowait(None))
        try:
            if self._static or not tasks:
                yield self._union(found)
            while True:
                await news.get()
                for task in tasks:
                    if task.done():
                        task.result()  # sources do not end by themselves; if one did, this says why
                while not news.empty():
                    news.get_nowait()
                yield self._union(found)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    @staticmethod
    def _union(found: dict[int, tuple[Found, ...]]) -> tuple[Found, ...]:
        by_address = {one.address: one for part in found.values() for one in part}
        return tuple(sorted(by_address.values()))
