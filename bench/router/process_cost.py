"""What the kernel says that a process and all that it started take."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
_CPUCLOCK_SCHED = 2  # in the id of a process's clock: what the scheduler counted
_GONE = (FileNotFoundError, ProcessLookupError)


def cpu_s(pid: int) -> float:
    """User and system time until now: of all threads to the nanosecond, those that have ended too; of processes that
    have ended to the tick, once their parents have waited for them."""
    return sum(own_cpu_s(one) + _waited_for_ticks(one) / _TICKS for one in _tree(pid))


def own_cpu_s(pid: int) -> float:
    """Without what it started; 0 once it has ended. By the process's own clock (clock_getcpuclockid(3)). /proc counts a
    process in ticks, and to the nanosecond only those threads that still run."""
    try:
        return time.clock_gettime_ns((~pid << 3) | _CPUCLOCK_SCHED) / 1e9
    except OSError:  # it has ended
        return 0.0


def peak_mib(pid: int) -> float:
    """The most memory that was ever resident. What several processes share counts for each."""
    return _status_mib(pid, "VmHWM")


def resident_mib(pid: int) -> float:
    """The memory that is resident now. What several processes share counts for each."""
    return _status_mib(pid, "VmRSS")


def pss_mib(pid: int) -> float:
    """The memory that one process has now, without what it started. Of what several share each has its part, so sums
    count nothing twice."""
    found = re.search(r"^Pss:\s*(\d+) kB$", _read(Path(f"/proc/{pid}/smaps_rollup")), re.MULTILINE)
    return int(found[1]) / 1024 if found else 0.0


def family(pid: int) -> list[int]:
    """The process, and all that it and those started."""
    return list(_tree(pid))


def _status_mib(pid: int, name: str) -> float:
    found = (
        re.search(rf"^{name}:\s*(\d+) kB$", _read(Path(f"/proc/{one}/status")), re.MULTILINE) for one in _tree(pid)
    )
    return sum(int(one[1]) for one in found if one) / 1024


def _waited_for_ticks(pid: int) -> int:
    fields = _read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return int(fields[13]) + int(fields[14]) if fields else 0


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
