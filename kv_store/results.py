"""Results on their way from a connector's threads to the engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from kv_store.base import TransferResult


class ResultQueue:
    """Any thread adds, the engine's thread drains. `deque` appends and pops are atomic, so there is no lock."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._results: deque[TransferResult] = deque()

    def add(self, results: Iterable[TransferResult]) -> None:
        added = list(results)
        self._results.extend(added)
        if added:
            self._wake()

    def drain(self) -> list[TransferResult]:
        """What was added so far, in order. Never waits."""
        drained: list[TransferResult] = []
        while self._results:
            drained.append(self._results.popleft())
        return drained
