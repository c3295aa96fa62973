"""The interface of sources of workers, which give the full set of addresses after each change."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol


@dataclass(slots=True, frozen=True, order=True)
class Found:
    """One worker (or router) that a source knows."""

    address: str  # host:port, as gRPC dials it
    pod: str = ""  # name of the Kubernetes pod behind it, if known


class Discovery(Protocol):
    """A source keeps its last set while it cannot look, so an outage of DNS or of an API server loses no worker."""

    @property
    def complete(self) -> bool:
        """True once every source has answered: from then on an empty set means that nobody is there."""
        ...

    def watch(self) -> AsyncGenerator[tuple[Found, ...], None]:
        """Yields the whole current set, sorted: as soon as something is known, then after each change.

        Runs until closed, and outlives every failure of what it watches. May be called once. Raises `StartupError`
        if the source can never answer; the message says what an operator has to do.
        """
        ...
