"""Workers of both roles as discovery finds them, for a registry that takes whole lists."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing

from common.types import WorkerRole
from router.fleet.discovery.sources import discover, is_static

SetAddresses = Callable[[Sequence[str], Sequence[str]], None]
"""Takes all prefill and all decode addresses there are now."""


def fixed(endpoints: Sequence[str]) -> list[str]:
    """Endpoints that need no lookup, and so are known before `follow` has begun."""
    return [text for text in endpoints if is_static([text])]


async def follow(prefill: Sequence[str], decode: Sequence[str], set_addresses: SetAddresses) -> None:
    """Calls `set_addresses` after each change, until cancelled; returns at once if every worker is fixed.

    Raises `ConfigError` for an endpoint that cannot be read, and an `ExceptionGroup` of what `Discovery.watch` raises.
    """
    found: dict[WorkerRole, list[str]] = {WorkerRole.PREFILL: fixed(prefill), WorkerRole.DECODE: fixed(decode)}
    sources = {
        WorkerRole.DECODE: discover(decode, key="decode"),
        WorkerRole.PREFILL: discover(prefill, key="prefill"),
    }

    async def follow_role(role: WorkerRole) -> None:
        async with aclosing(sources[role].watch()) as sets:
            async for current in sets:
                found[role] = [one.address for one in current]
                set_addresses(found[WorkerRole.PREFILL], found[WorkerRole.DECODE])

    async with asyncio.TaskGroup() as group:
        for role, endpoints in ((WorkerRole.DECODE, decode), (WorkerRole.PREFILL, prefill)):
            if not is_static(endpoints):
                group.create_task(follow_role(role))
