"""What the kernel says that a process and all that it started take."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
_PEAK = re.compile(r"^VmHWM:\s*(\d+) kB$", re.MULTILINE)


def cpu_s(pid: int) -> float:
    """User and system time of all threads, until now."""
    return sum(_cpu_ticks(one) for one in _tree(pid)) / _TICKS


def peak_mib(pid: int) -> float:
    """The most memory that was ever resident. What several processes share counts for each."""
    peaks = (_PEAK.search(Path(f"/proc/{one}/status").read_text()) for one in _tree(pid))
    return sum(int(peak[1]) for peak in peaks if peak) / 1024


def _cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def _tree(pid: int) -> Iterator[int]:
    yield pid
    for thread in Path(f"/proc/{pid}/task").iterdir():
        for child in (thread / "children").read_text().split():
            yield from _tree(int(child))
