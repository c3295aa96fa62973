"""Numbers by name behind a router's limits: what is in flight, and how full buckets are.

`LocalLedger` keeps those of a router of one process. `router.processes.shared_ledger` has one in memory that all
processes of a router see, so that a limit holds for all of them together.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import MutableSequence
from contextlib import AbstractContextManager
from typing import Protocol


class Ledger(Protocol):
    num_processes: int

    def take(self, name: str, num: int, most: float) -> bool:
        """Adds `num` to what this process has of `name`. Returns False, and changes nothing, if the total of all
        processes would exceed `most`."""

    def give(self, name: str, num: int) -> None:
        """Takes `num` off this process's number again."""

    def total(self, name: str) -> int:
        """The sum over all processes under `name`."""

    def state(self, name: str) -> MutableSequence[float]:
        """Three numbers under a name, 0.0 at first; the same ones for all. To be used inside of `locked`."""

    def forget_state(self, name: str) -> None:
        """Frees a state that is not used any more."""

    def locked(self) -> AbstractContextManager[None]:
        """Use it around the use of states: only one process or thread is inside at a time. Do not enter it twice, and
        do not wait inside."""


class LocalLedger:
    def __init__(self) -> None:
        self.num_processes = 1
        self._totals: Counter[str] = Counter()
        self._states: dict[str, list[float]] = {}

    def take(self, name: str, num: int, most: float) -> bool:
        if self._totals[name] + num > most:
            return False
        self._totals[name] += num
        return True

    def give(self, name: str, num: int) -> None:
        self._totals[name] -= num
        if not self._totals[name]:
            del self._totals[name]

    def total(self, name: str) -> int:
        return self._totals[name]

    def state(self, name: str) -> MutableSequence[float]:
        return self._states.setdefault(name, [0.0, 0.0, 0.0])

    def forget_state(self, name: str) -> None:
        self._states.pop(name, None)

    def locked(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()
