"""Processes that a benchmark starts, as a user would, and ends again, whatever happens to it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import IO

from baton.stack.processes import Child, OwnProcess
from common.errors import StartupError

_END_GRACE_S = 60.0


@contextlib.contextmanager
def started(
    command: Sequence[str], what: str, stdout: int = subprocess.PIPE, log: IO[bytes] | None = None
) -> Iterator[Child]:
    """A process, which ends with the context; its standard error goes to `log`, or to this process's. SIGTERM to this
    process ends it as Ctrl-C does, so that it leaves none behind."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _exit)
    process = OwnProcess(command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=log, start_new_session=True)
    child = Child(what, process)
    try:
        yield child
    finally:
        _end(child)


@contextlib.contextmanager
def running(command: Sequence[str], what: str, log: IO[bytes] | None = None) -> Iterator[dict[str, str]]:
    """A process that prints `ready key=value ...`; gives those, and its `pid`. Raises `StartupError` if it ends
    without."""
    with started(command, what, log=log) as child:
        assert child.process.stdout is not None
        for line in child.process.stdout:
            first, *words = line.decode(errors="replace").split()
            if first == "ready":
                yield {**dict(word.split("=", 1) for word in words), "pid": str(child.process.pid)}
                return
        raise StartupError(f"{what} did not start; its reason is above")


def ready_client(module: str, *arguments: str, api_key: str) -> subprocess.Popen[str]:
    """`python -m module arguments`, from when it prints `ready`. It asks until its standard input ends, and prints what
    it found. Raises `StartupError`."""
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "BATON_API_KEY": api_key},
    )
    assert process.stdout is not None
    if process.stdout.readline() != "ready\n":
        process.kill()
        process.communicate()
        raise StartupError(f"{module} did not start; its reason is above")
    return process


def _exit(signum: int, _frame: object) -> None:
    sys.exit(128 + signum)


def _end(child: Child) -> None:
    """SIGTERM, which drains; SIGKILL to it and all that it started, if that takes too long or is interrupted."""
    child.terminate()
    try:
        child.process.wait(_END_GRACE_S)
    finally:
        child.kill()
        child.process.wait()
        if child.process.stdout is not None:
            child.process.stdout.close()


@contextlib.contextmanager
def running_stack(arguments: Sequence[str]) -> Iterator[str]:
    """`baton up` on free ports, with `arguments`; gives its gRPC address."""
    flags = ["--http-port=0", "--grpc-port=0", "--log-level=warning", "--max-restarts=0"]  # a lost worker is no figure
    with running([sys.executable, "-m", "baton", "up", *flags, *arguments], "baton up") as fields:
        yield fields["grpc"]
