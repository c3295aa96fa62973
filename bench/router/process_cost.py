"""What the kernel says that a process and all that it started take."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
_GONE = (FileNotFoundError, ProcessLookupError)
_PEAK = re.compile(r"^VmHWM:\s*(\d+) kB$", re.MULTILINE)


def cpu_s(pid: int) -> float:
    """User and system time of all threads, until now."""
    return sum(_cpu_ticks(one) for one in _tree(pid)) / _TICKS


def peak_mib(pid: int) -> float:
    """The most memory that was ever resident. What several processes share counts for each."""
    peaks = (_PEAK.search(_read(Path(f"/proc/{one}/status"))) for one in _tree(pid))
    return sum(int(peak[1]) for peak in peaks if peak) / 1024


def _cpu_ticks(pid: int) -> int:
    fields = _read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12]) if fields else 0


def _tree(pid: int) -> Iterator[int]:
    yield pid
    threads: list[Path] = []
    with contextlib.suppress(*_GONE):
        threads += Path(f"/proc/{pid}/task").iterdir()
    for thread in threads:
        for child in _read(thread / "children").split():
            yield from _tree(int(child))


def _read(path: Path) -> str:
    """Empty if its process or thread has ended since it was listed."""
    try:
        return path.read_text()
    except _GONE:
        return ""
