"""Child processes: started, watched, and ended without leaving an orphan.

Everything that happens (a child is ready, a child ended, a signal came) is one event in one queue, which one thread
reads. Each child leads a session of its own, so that Ctrl-C in a terminal reaches only this process, which then
decides the order in which the children end; and the kernel kills each child when this process dies, however it dies.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import re
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from baton.stack.fork_messages import Imported
from baton.stack.fork_server import ForkedProcess
from common.errors import BatonError, InternalError, StartupError

log = logging.getLogger(__name__)

_TETHER = str(Path(__file__).with_name("tether.py"))
_ERROR_LINE = re.compile(r"^baton[\w -]*: error: (.*)$")
_OUTPUT_GRACE_S = 1.0  # for the last lines of a child that has ended; a grandchild may hold the pipe open for ever


@dataclass(slots=True, frozen=True)
class Ready:
    """A child printed `ready key=value ...`."""

    child: Child
    fields: Mapping[str, str]


@dataclass(slots=True, frozen=True)
class Ended:
    child: Child
    code: int  # exit code; -N if signal N ended it


@dataclass(slots=True, frozen=True)
class Signalled:
    signum: int


@dataclass(slots=True, frozen=True)
class Finished:
    """The work that runs beside the children is done (see `baton.stack.local_stack`)."""

    code: int
    error: BatonError | None = None


Event = Ready | Ended | Signalled | Finished | Imported
Events = queue.SimpleQueue[Event]  # its put() may be called from a signal handler


class OwnProcess(subprocess.Popen[bytes]):
    def wait_ended(self) -> None:
        """Returns once it has ended. Its pid is not another process's yet, if the system can say so."""
        if hasattr(os, "waitid"):
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)


@dataclass(slots=True, eq=False)
class Child:
    """One process. `name` is how messages call it."""

    name: str
    process: OwnProcess | ForkedProcess
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=20))  # its last lines on standard error
    code: int | None = None  # exit code once it has ended; -N if signal N ended it
    watcher: threading.Thread | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)  # a pid is ours only until it is reaped

    @property
    def running(self) -> bool:
        return self.code is None

    def reason(self) -> str:
        """Why it ended, in its own words if it wrote any."""
        for line in reversed(self.tail):
            if match := _ERROR_LINE.match(line):
                return match[1]
        if self.code is not None and self.code < 0:
            return f"ended by {signal.Signals(-self.code).name}"
        said = f": {self.tail[-1]}" if self.tail else ""
        return f"ended with exit code {self.code}{said}"

    def terminate(self) -> None:
        with self._lock:
            if self.running:
                os.kill(self.process.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Ends it and everything it started, at once."""
        with self._lock:
            if self.running:
                self._kill_group()

    def join(self, timeout: float | None = None) -> None:
        """Waits until it has ended and its last lines were read."""
        if self.watcher is not None:
            self.watcher.join(timeout)

    def reap(self) -> int:
        """Waits for its end, in the watching thread, and kills what it left behind. Returns the exit code."""
        self.process.wait_ended()
        if hasattr(os, "waitid"):
            self._kill_group()
        code = self.process.wait()
        with self._lock:
            self.code = code
        return code

    def _kill_group(self) -> None:
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:  # a fork that does not lead a group yet has started nothing
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGKILL)
        except PermissionError:  # macOS: a group of zombies
            pass


def tethered(argv: Sequence[str], cores: Sequence[int] = ()) -> list[str]:
    """A command that becomes `argv` and, on Linux, ends with this process. On `cores`, if there are any."""
    if sys.platform != "linux":
        return list(argv)
    return [sys.executable, "-I", "-S", _TETHER, str(os.getpid()), ",".join(map(str, cores)), *argv]


def start(
    name: str, argv: Sequence[str], events: Events, *, environ: Mapping[str, str], cores: Sequence[int] = ()
) -> Child:
    """Starts a command on `cores` (anywhere if empty) and watches it. Raises StartupError when there can be no more
    processes.

    Must run in the main thread: the kernel ties a child's life to the thread that started it.
    """
    try:
        process = OwnProcess(
            tethered(argv, cores),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(environ),
            start_new_session=True,
        )
    except OSError as error:
        raise StartupError(f"{name} cannot be started: {error}") from error
    return watched(Child(name, process), events)


def watched(child: Child, events: Events) -> Child:
    """Has threads tell `events` what becomes of it."""

    def vital(target: Callable[..., None], *args: object) -> None:
        try:
            target(*args)
        except Exception as error:  # without it a child would hang or end, and nobody would notice
            log.exception("a thread ended that this process stands on", extra={"child": child.name})
            events.put(Finished(1, InternalError(f"{child.name} is not watched any more: {error!r}")))

    def thread(target: Callable[..., None], *args: object) -> threading.Thread:
        name = f"{child.name}-{target.__name__}"
        one = threading.Thread(target=vital, args=(target, *args), name=name, daemon=True)
        one.start()
        return one

    output = [thread(_read_stdout, child, events), thread(_read_stderr, child)]
    child.watcher = thread(_wait, child, output, events)
    return child


def _read_stdout(child: Child, events: Events) -> None:
    for line in _lines(child.process.stdout):
        if line.startswith("ready "):
            pairs = (word.partition("=") for word in line.split()[1:])
            events.put(Ready(child, {key: value for key, _, value in pairs}))
        else:
            _to_stderr(line)


def _read_stderr(child: Child) -> None:
    for line in _lines(child.process.stderr):
        if line.strip():
            child.tail.append(line)
        _to_stderr(line)


def _wait(child: Child, output: Sequence[threading.Thread], events: Events) -> None:
    code = child.reap()
    for thread in output:
        thread.join(_OUTPUT_GRACE_S)
    events.put(Ended(child, code))


def _lines(pipe: IO[bytes] | None) -> Iterator[str]:
    if pipe is None:
        raise ValueError("the child was started without this pipe")
    with pipe:
        for line in pipe:
            yield line.decode(errors="replace").rstrip("\n")


def _to_stderr(line: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # nobody listens any more; children go on
        sys.stderr.write(line + "\n")
        sys.stderr.flush()
