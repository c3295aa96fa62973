"""The children's side of `common.bounded_process`, which says what they are for.

One line on standard input is a job: its number, and JSON. One on standard output is its answer: JSON of both.
"""

from __future__ import annotations

import json
import mmap
import os
import resource
import select
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.bounded_process import Limits, stack_of

Job = dict[str, Any]
Do = Callable[[Job], dict[str, object]]

_NUMBER_BYTES = 8
_WORN = 69  # exit code of a runner that keeps too much memory
_BROKEN = 70  # of one that broke for no reason that a signal names


def prepare() -> None:
    """To be called first. What jobs need is read after it."""
    for ignored in (signal.SIGINT, signal.SIGTERM):  # they go to whole groups, and the parent still has answers to give
        signal.signal(ignored, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def serve(do: Do, limits: Limits, *, opens_files: bool) -> int:
    """Does jobs until there are no more. `do` gives the answer to one. `opens_files`: if false, the process of the jobs
    can open no file and no socket, nor start a process."""
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)  # what breaks says so, in the client's words
    current = mmap.mmap(-1, _NUMBER_BYTES)  # the number of the job that is being done; 0 if none is
    while (code := _run_one(do, limits, current, opens_files=opens_files)) != 0:
        if code != _WORN:
            _write(_line(int.from_bytes(current[:]), {"died": code}))
    return 0


def _run_one(do: Do, limits: Limits, current: mmap.mmap, *, opens_files: bool) -> int:
    """Forks a runner, and waits for its end. Returns its exit code: 0 if there are no more jobs, -N if signal N ended
    it. This process has one thread, so that the copy of it is whole."""
    current[:] = bytes(_NUMBER_BYTES)
    pid = os.fork()
    if pid == 0:
        try:
            threading.Thread(target=_exit_with_parent, daemon=True).start()
            runner = _Runner(do, limits, current)
            with stack_of(limits.stack_bytes):
                thread = threading.Thread(target=runner.do_jobs)
                thread.start()
                if not opens_files:
                    runner.seal()
                runner.may_begin.set()
            thread.join()
        finally:
            os._exit(_BROKEN)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _exit_with_parent() -> None:
    """Whatever this process is at: nobody waits for the answer."""
    closed = select.poll()
    closed.register(0, 0)  # reports a hang-up alone
    closed.poll()
    os._exit(0)


class _Runner:
    def __init__(self, do: Do, limits: Limits, current: mmap.mmap) -> None:
        self._do, self._limits, self._current = do, limits, current
        self._status = _open_status()
        self._before_all = self._data_bytes()
        self.may_begin = threading.Event()

    def seal(self) -> None:
        """From now on nothing is opened or started: only what is open stays."""
        num_open = 1 + max(0, 1, 2, -1 if self._status is None else self._status)
        resource.setrlimit(resource.RLIMIT_NOFILE, (num_open, num_open))
        resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))

    def do_jobs(self) -> None:
        self.may_begin.wait()
        for line in sys.stdin.buffer:
            number, _, job = line.partition(b" ")
            self._current[:] = int(number).to_bytes(_NUMBER_BYTES)
            _write(self._within_limits(int(number), job))
            self._current[:] = bytes(_NUMBER_BYTES)
            if self._data_bytes() > self._before_all + self._limits.num_bytes:
                os._exit(_WORN)
        os._exit(0)

    def _within_limits(self, number: int, job: bytes) -> bytes:
        """The line of the answer. If that takes more than the limits, to read the job and to write the line included,
        the kernel ends this process."""
        self._limit_memory(self._data_bytes())
        signal.setitimer(signal.ITIMER_PROF, self._limits.cpu_s)
        try:
            return _line(number, self._do(json.loads(job)))
        except MemoryError:
            signal.raise_signal(signal.SIGABRT)  # as native code does
            raise
        except Exception as error:
            return _line(number, {"failed": f"{type(error).__name__}: {error}"})
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            _, hard = resource.getrlimit(resource.RLIMIT_DATA)
            resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))  # the next job is read without this one's limit

    def _data_bytes(self) -> int:
        """Memory of this process that is its own, as `RLIMIT_DATA` counts it. 0 if the system does not tell."""
        if self._status is None:
            return 0
        lines = os.pread(self._status, 2**16, 0).decode().splitlines()
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData:")), 0)

    def _limit_memory(self, before: int) -> None:
        num_bytes = before + self._limits.num_bytes
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        if before and (hard == resource.RLIM_INFINITY or num_bytes < hard):
            resource.setrlimit(resource.RLIMIT_DATA, (num_bytes, hard))


def _open_status() -> int | None:
    try:
        return os.open("/proc/self/status", os.O_RDONLY)
    except OSError:
        return None


def _line(number: int, answer: dict[str, object]) -> bytes:
    return f"\n{json.dumps([number, answer])}\n".encode()  # a runner that died may have left half a line


def _write(line: bytes) -> None:
    left = memoryview(line)
    while left:
        left = left[os.write(1, left) :]
