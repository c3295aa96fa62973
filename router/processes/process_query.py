"""Queries to a router as a whole, which each of its processes answers for itself."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True, frozen=True)
class ProcessQuery(Generic[T]):
    name: str
    kind: type[T]  # of each thing that is told: a dataclass
    tell: Callable[[int, str | None, str], list[T]]  # a limit, whose they have to be, and which one if not all
    prepare: Callable[[int, str | None, str], Awaitable[None]] | None = None
    """Awaited before `tell`, which then holds nobody up: for what takes long to make."""

    async def told(self, limit: int, tenant: str | None, which: str) -> list[T]:
        if self.prepare is not None:
            await self.prepare(limit, tenant, which)
        return self.tell(limit, tenant, which)
