"""What abuse must not change: the processes, their memory, files and tasks, and what is in their logs."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.chaos.memory import anonymous_mb, processes
from tests.integration.stack import Fleet, wait_for

SETTLE_S = 60.0
REPEATS = 8
AT_REST_MIB = 4.0
MORE_FILES = 4  # a channel to a peer that was not there before, a connection of the quiet client
MORE_TASKS = 8  # of a channel to a peer, and those that happen to run when they are counted
TASKS = re.compile(r"^baton_process_tasks (\S+)$", re.MULTILINE)
RUNNING = re.compile(r"^baton_router_requests_running (\S+)$", re.MULTILINE)
INTERNAL = re.compile(r'^baton_router_requests_total\{interface="(\w+)",outcome="internal"\} (\S+)$', re.MULTILINE)
COMPLAINT = re.compile(r"Traceback \(most recent|^\S+ (?:ERROR|CRITICAL) ", re.MULTILINE)


@dataclass(slots=True, frozen=True)
class Sample:
    """Of one process."""

    memory_mib: float
    num_files: int


class Vitals:
    """How a fleet is when this is made, and whether it is so again."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self._logs = {log: log.stat().st_size for log in self._log_files()}
        self._pids = dict(processes(fleet))
        self.before = self.samples()
        self._tasks_before = self.num_tasks()

    def _log_files(self) -> list[Path]:
        return [self.fleet.router.log, *(member.process.log for member in self.fleet.members)]

    def samples(self) -> dict[str, Sample]:
        """A sample of each process, by its name."""
        found = {}
        for name, pid in self._pids.items():
            memory_mib = anonymous_mb(pid)
            assert memory_mib is not None, f"{name} ended"
            found[name] = Sample(memory_mib, len(list(Path(f"/proc/{pid}/fd").iterdir())))
        return found

    def settle(self) -> None:
        """Waits until nothing is in flight anywhere. Raises AssertionError."""
        self.fleet.settle()
        wait_for("the router has no request", lambda: self.num_running() == 0, SETTLE_S)

    def num_running(self) -> float:
        (number,) = RUNNING.findall(self._metrics())
        return float(number)

    def _metrics(self, url: str | None = None) -> str:
        """Of the router, if no other is named."""
        return httpx.get(f"{url or self.fleet.http}/metrics", timeout=60, trust_env=False).text

    def num_tasks(self) -> dict[str, int]:
        """How many tasks each event loop had a second ago at most, by its process."""
        pages = {
            f"{one.name} front": self._metrics(f"http://127.0.0.1:{one.metrics_port}") for one in self.fleet.members
        }
        pages["router"] = self._metrics()
        found = {}
        for name, page in pages.items():
            (number,) = TASKS.findall(page)
            found[name] = int(float(number))
        return found

    def more_tasks(self) -> dict[str, int]:
        now = self.num_tasks()
        more = {name: now[name] - before for name, before in self._tasks_before.items()}
        return {name: number for name, number in more.items() if number > MORE_TASKS}

    def until_at_rest(self, abuse: Callable[[], object]) -> None:
        """Does it again until that leaves no memory behind, which a leak always does. The first times make what stays,
        and malloc needs some more to have room for all that is there at once."""
        most = self.samples()
        for _ in range(REPEATS):
            abuse()
            self.settle()
            now = self.samples()
            grown = {name: round(sample.memory_mib - most[name].memory_mib, 1) for name, sample in now.items()}
            if all(mib <= AT_REST_MIB for mib in grown.values()):
                return
            most = {name: max(sample, most[name], key=lambda one: one.memory_mib) for name, sample in now.items()}
        raise AssertionError(f"MiB more each time, at last: {grown}")

    def check(self, growth_mib: float) -> None:
        """The same processes live, hold at most so much more memory, no more files and no more tasks, and complained of
        nothing."""
        assert dict(processes(self.fleet)) == self._pids, "a process ended"
        self.settle()
        assert not self.complaints(), self.complaints()
        failures = [(interface, number) for interface, number in INTERNAL.findall(self._metrics()) if float(number)]
        assert not failures, failures
        wait_for("files are closed", lambda: not self.more_files(), SETTLE_S)
        try:
            wait_for("tasks have ended", lambda: not self.more_tasks(), SETTLE_S)
        except AssertionError as error:
            raise AssertionError(f"{error}; more than before: {self.more_tasks()}") from None
        grown = self.growth_mib()
        assert all(mib <= growth_mib for mib in grown.values()), f"MiB more than before: {grown}"

    def complaints(self) -> str:
        """What the processes have logged since, from the first error or stack on."""
        found = []
        for log, size in self._logs.items():
            text = log.read_bytes()[size:].decode(errors="replace")
            if match := COMPLAINT.search(text):
                found.append(f"{log.name}: {text[match.start() :][:4000]}")
        return "\n".join(found)

    def more_files(self) -> dict[str, int]:
        now = self.samples()
        return {
            name: now[name].num_files - before.num_files
            for name, before in self.before.items()
            if now[name].num_files > before.num_files + MORE_FILES
        }

    def growth_mib(self) -> dict[str, float]:
        now = self.samples()
        return {name: round(now[name].memory_mib - before.memory_mib, 1) for name, before in self.before.items()}
