"""How long a router's event loop works without a look at others."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests.integration.stack import Fleet

PAUSE_S = 0.02
PATIENCE_S = 60.0


class Stalls:
    """What the loop's thread works while one small question waits for its answer: in CPU time, which other processes
    of a busy machine do not lengthen."""

    def __init__(self, fleet: Fleet) -> None:
        pid = fleet.router.popen.pid
        self._loop = Path(f"/proc/{pid}/task/{pid}/schedstat")
        self._url = f"{fleet.http}/health"
        self._done = threading.Event()
        self.found_s: list[float] = []
        self._thread = threading.Thread(target=self._watch)

    def _cpu_s(self) -> float:
        return int(self._loop.read_text().split()[0]) / 1e9

    def _watch(self) -> None:
        with httpx.Client(timeout=PATIENCE_S, trust_env=False) as client:
            while not self._done.wait(PAUSE_S):
                before = self._cpu_s()
                client.get(self._url)
                self.found_s.append(self._cpu_s() - before)

    @contextmanager
    def watching(self) -> Iterator[None]:
        self._thread.start()
        try:
            yield
        finally:
            self._done.set()
            self._thread.join()
