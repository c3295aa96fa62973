"""A child process for work on what clients wrote as programs: grammars, chat templates.

Such work can overflow a stack, take all memory, or go on for hours. Here that ends a process of its own, which nobody
else uses.

    this process ── jobs, answers ──┬─ keeper: has read what all jobs need; forks a runner, and another one if that dies
                                    │          (a millisecond), and says what it died of
                                    └─ runner: does the jobs, each within `Limits`

Both end when this process does, however it ends: the pipe of the jobs closes. They have no other file or socket.
`common.bounded_child` is their side.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO

from common.errors import InternalError, UnavailableError

MAX_ANSWER_S = 20.0  # on the clock: then the child is stuck or gets no processor

# Signals of code that broke on what it read, and of the limits. Any other end is not the client's fault.
_BLAMED = (signal.SIGPROF, signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGTRAP, signal.SIGFPE)

log = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True, kw_only=True)
class Limits:
    """Of one job."""

    cpu_s: float
    num_bytes: int  # that it may take beyond what the child has without it
    stack_bytes: int  # of the thread that does it


class JobDiedError(Exception):
    """The job broke the runner, or went beyond a limit. Says why: "it ..."."""


@dataclass(slots=True, frozen=True, kw_only=True)
class ChildWords:
    """What errors say of a child."""

    subjects: str  # "grammars"
    work: str  # "compile"
    waiting: str  # of a job that others kept waiting
    broken: str  # of a job that broke the runner: "it ..."


class BoundedProcess:
    """One child. It starts with the first job or with `start`. Any thread may use it: jobs are done one after the
    other."""

    def __init__(self, module: str, arguments: Sequence[str], limits: Limits, words: ChildWords) -> None:
        """`module` is run with `arguments`, and calls `bounded_child.serve` with these `limits`."""
        self._command = [sys.executable, "-m", module, *arguments]
        self._limits, self._words = limits, words
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._answers = bytearray()  # what came and is no whole line yet
        self._num_asked = 0

    @property
    def pid(self) -> int | None:
        """Of the keeper; None if none runs."""
        return None if self._child is None else self._child.pid

    def start(self) -> None:
        """Starts the child, unless it runs, and does not wait until it is ready."""
        with self._lock:
            self._started()

    def close(self) -> None:
        with self._lock:
            self._end()

    def ask(self, job: dict[str, object], wait_s: float = MAX_ANSWER_S) -> dict[str, object]:
        """The child's answer to a job; both are JSON. Raises `JobDiedError`, and `UnavailableError` if the others' jobs
        took all of `wait_s` or the child got no time to answer."""
        if not self._lock.acquire(timeout=wait_s):
            raise UnavailableError(self._words.waiting)
        try:
            self._num_asked += 1
            return self._ask(f"{self._num_asked} {json.dumps(job)}\n".encode())
        finally:
            self._lock.release()

    def _ask(self, job: bytes) -> dict[str, object]:
        for is_last in (False, True):
            child = self._started()
            try:
                _write(child.stdin, job)
                answer = self._answer(child)
            except OSError as error:  # somebody ended it since the last job
                self._end()
                if is_last:
                    raise UnavailableError(f"the process that works on {self._words.subjects} ended") from error
            else:
                break
        if (reason := answer.get("failed")) is not None:
            raise InternalError(f"the process that works on {self._words.subjects} failed: {reason}")
        return answer

    def _why_died(self, code: int) -> str:
        """`code` as of `os.waitstatus_to_exitcode`."""
        if code == -signal.SIGPROF:
            return f"it costs more than {self._limits.cpu_s:g} s to {self._words.work}"
        if code == -signal.SIGABRT:
            return f"it costs more than {self._limits.num_bytes // 2**20} MiB to {self._words.work}"
        return self._words.broken

    def _started(self) -> subprocess.Popen[bytes]:
        if self._child is not None and self._child.poll() is None:
            return self._child
        self._end()
        self._child = subprocess.Popen(  # noqa: S603 - our own command
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        return self._child

    def _answer(self, child: subprocess.Popen[bytes]) -> dict[str, object]:
        """To the last job. Raises `JobDiedError` if the job ended the child, `OSError` if somebody else did, and
        `UnavailableError` if it does not answer."""
        give_up = time.monotonic() + MAX_ANSWER_S
        output = child.stdout
        if output is None:
            raise InternalError("the child was started without this pipe")
        num_seen = 0
        while True:
            if (end := self._answers.find(b"\n", num_seen)) >= 0:
                line = bytes(self._answers[:end])
                del self._answers[: end + 1]
                num_seen = 0
                match _read(line):
                    case [self._num_asked, {"died": int(code)}]:
                        log.warning("a child process ended", extra={"work_on": self._words.subjects, "code": code})
                        if -code not in _BLAMED:
                            raise BrokenPipeError("the runner was ended")
                        raise JobDiedError(self._why_died(code))
                    case [self._num_asked, dict(found)]:
                        return found
                continue
            num_seen = len(self._answers)
            ready, _, _ = select.select([output], [], [], max(0.0, give_up - time.monotonic()))
            if not ready:
                self._end()
                raise UnavailableError(f"this machine has no time for {self._words.subjects}")
            if not (read := os.read(output.fileno(), 2**20)):
                raise BrokenPipeError("the child ended")
            self._answers += read

    def _end(self) -> None:
        child, self._child, self._answers = self._child, None, bytearray()
        if child is None:
            return
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()  # the runner ends, too
        child.kill()
        child.wait()


def _read(line: bytes) -> object:
    """None for what a runner wrote in part before it died."""
    try:
        return json.loads(line)
    except ValueError:
        return None


_STACK_LOCK = threading.Lock()


@contextlib.contextmanager
def stack_of(num_bytes: int) -> Iterator[None]:
    """Threads that start inside have this stack."""
    with _STACK_LOCK:
        before = threading.stack_size(num_bytes)
        try:
            yield
        finally:
            threading.stack_size(before)


def _write(pipe: IO[bytes] | None, content: bytes) -> None:
    if pipe is None:
        raise InternalError("the child was started without this pipe")
    left = memoryview(content)
    while left:
        left = left[pipe.write(left) :]
