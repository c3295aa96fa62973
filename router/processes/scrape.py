"""The metrics of all processes of a router, for one page.

prometheus_client's multi-process mode keeps each process's metrics in files: counters and histograms are summed over
them, gauges as each says (`multiprocess_mode`). The counts of a process that has ended stay, in files of process 0.
These files hold no exemplars.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from prometheus_client import CollectorRegistry, Metric, ProcessCollector
from prometheus_client.mmap_dict import MmapedDict
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
"""Names the files' directory; to be set before a process starts."""
_START_TIME = "process_start_time_seconds"  # the earliest; all others are summed


def families(directory: str, pids: Callable[[], Iterable[int]]) -> list[Metric]:
    """The metrics of all processes. `pids` are of the processes whose CPU time, memory and open files are summed."""
    registry = CollectorRegistry()
    MultiProcessCollector(registry, directory)  # type: ignore[no-untyped-call]
    registry.register(_Processes(pids))
    with _locked(directory, fcntl.LOCK_SH):
        return list(registry.collect())


def keep_totals(directory: str, pid: int) -> bool:
    """Adds the counts of a process that has ended to those of earlier ones, and drops its gauges. Returns False and
    changes nothing while a page is being made, since the process that makes it may hang."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(_locked(directory, fcntl.LOCK_EX | fcntl.LOCK_NB))
        except BlockingIOError:
            return False
        for path in Path(directory).glob(f"*_{pid}.db"):
            kind = path.name.removesuffix(f"_{pid}.db")
            if not kind.startswith("gauge"):
                kept = MmapedDict(str(path.with_name(f"{kind}_0.db")))  # type: ignore[no-untyped-call]
                for key, value, *_ in MmapedDict.read_all_values_from_file(str(path)):  # type: ignore[no-untyped-call]
                    before, _ = kept.read_value(key)  # type: ignore[no-untyped-call]
                    kept.write_value(key, before + value, 0.0)  # type: ignore[no-untyped-call]
                kept.close()  # type: ignore[no-untyped-call]
            path.unlink()
    return True


@contextlib.contextmanager
def _locked(directory: str, kind: int) -> Iterator[None]:
    """A lock: any number of processes may read the files at a time, but none while totals move from one file to
    another."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(handle, kind)
        yield
    finally:
        os.close(handle)


class _Processes(Collector):
    def __init__(self, pids: Callable[[], Iterable[int]]) -> None:
        self._pids = pids

    def collect(self) -> Iterable[Metric]:
        found: dict[str, Metric] = {}
        for pid in self._pids():
            for metric in _process(pid):
                whole = found.setdefault(metric.name, metric)
                if whole is metric:
                    continue
                pairs = zip(whole.samples, metric.samples, strict=True)
                whole.samples = [one._replace(value=_merged(metric.name, one.value, more.value)) for one, more in pairs]
        return found.values()


def _process(pid: int) -> Iterable[Metric]:
    return ProcessCollector(pid=lambda: pid, registry=None).collect()


def _merged(name: str, one: float, other: float) -> float:
    return min(one, other) if name == _START_TIME else one + other
