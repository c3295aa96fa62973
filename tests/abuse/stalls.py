"""How long event loops work without a look at others."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from tests.integration.stack import Fleet


@dataclass(slots=True, frozen=True)
class Loop:
    """Of a process whose main thread runs it."""

    name: str
    pid: int
    place: str  # where it is asked: a URL, or an address for gRPC


def loops_of(fleet: Fleet) -> list[Loop]:
    """The router's is asked over both interfaces: on their way through the loop, questions differ."""
    router = fleet.router.popen.pid
    return [
        Loop("router, REST", router, fleet.http),
        Loop("router, gRPC", router, fleet.grpc),
        *(Loop(member.name, member.process.popen.pid, member.admin) for member in fleet.members),
    ]


class Stalls:
    """What each loop works while one small question waits for its answer: in CPU time, which other processes of a busy
    machine do not lengthen."""

    def __init__(self, loops: Sequence[Loop]) -> None:
        self._loops = loops
        self.found_s: dict[str, list[float]] = {}
        """By the loop's name, for each question, the longest first; complete after `watching`."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        with ExitStack() as stack:
            watchers = {loop.name: stack.enter_context(_started(loop)) for loop in self._loops}
            for name, watcher in watchers.items():
                assert watcher.stdout is not None
                assert watcher.stdout.readline() == "ready\n", f"nobody watches {name}; the reason is above"
            yield
            for name, watcher in watchers.items():
                output, _ = watcher.communicate()
                assert watcher.returncode == 0, f"nobody watched {name} to the end; the reason is above"
                self.found_s[name] = sorted(json.loads(output), reverse=True)


@contextmanager
def _started(loop: Loop) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.abuse.loop_watch", str(loop.pid), loop.place]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as watcher:
        try:
            yield watcher
        finally:
            watcher.kill()  # if it is not done yet
