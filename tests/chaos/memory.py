"""What each process holds of memory of its own, from when it is warm until the end."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from tests.integration.stack import Fleet, descendants

WARM_S = 30.0  # since it serves: buffers, caches and allocators have the size that they keep


@dataclass(slots=True)
class _Life:
    name: str
    seen_at: float
    warm_mb: float | None = None
    last_mb: float = 0.0


class Memory:
    """`look` now and then, and once more when everything is idle again."""

    def __init__(self) -> None:
        self._lives: dict[int, _Life] = {}  # by process

    def look(self, fleet: Fleet) -> None:
        now = time.monotonic()
        starting = {member.name for member in fleet.members if member.process.ready_line() is None}
        for name, pid in processes(fleet):
            if name.split()[0] in starting:
                continue
            held_mb = anonymous_mb(pid)
            life = self._lives.setdefault(pid, _Life(name, now))
            if held_mb is None:
                continue
            if life.warm_mb is None and now - life.seen_at >= WARM_S:
                life.warm_mb = held_mb
            life.last_mb = held_mb

    def growth_mb(self) -> dict[str, float]:
        """Of the life that grew most among those that were ever warm, by name. Of one that has ended, until it was last
        looked at."""
        found: dict[str, float] = {}
        for life in self._lives.values():
            if life.warm_mb is not None:
                grown_mb = round(life.last_mb - life.warm_mb, 1)
                found[life.name] = max(found.get(life.name, grown_mb), grown_mb)
        return found


def processes(fleet: Fleet) -> list[tuple[str, int]]:
    """Name and pid of each that the fleet has now."""
    found = [(router.name, router.process.popen.pid) for router in fleet.routers]
    for member in fleet.members:
        front = member.process.popen.pid
        found.append((f"{member.name} front", front))
        found += [(f"{member.name} engine", pid) for pid in descendants(front)]
    return found


def anonymous_mb(pid: int) -> float | None:
    """Memory that no file and no other process shares, in MiB; None if the process has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    kilobytes = [int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon:")]
    return kilobytes[0] / 1024 if kilobytes else None
