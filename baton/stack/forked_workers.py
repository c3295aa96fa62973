"""`python -m baton.stack.forked_workers MODEL CACHE_DIR FD`: imports what a simulated worker needs, and forks workers.

FD is the socket by which `baton.stack.fork_server` asks for them. This process only imports and forks: a process that
uses gRPC, an event loop or threads cannot be forked safely.
"""

from __future__ import annotations

import contextlib
import gc
import os
import selectors
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from functools import partial

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # of numpy: it would start its threads when it is imported
os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # as `baton.cli.main`

import numpy.random  # noqa: F401 (numpy imports it when it is first used)

import baton.stack.worker_process as worker_process
import engine.core
import engine.devices
import engine.learning.report
import engine.learning.start
import engine.step_profiler  # noqa: F401
from baton.cli.options import SettingsCommand
from baton.settings import WORKER_SETTINGS
from baton.stack.fork_messages import MAX_BYTES, Ended, Fork, Forked, Imported, Reap, decode, encode
from common.errors import BatonError
from common.types import WorkerRole
from engine.loading.embedded_model import ensure_model
from engine.simulated.model import read_simulated_model
from kv_store.registry import connector_class
from worker.forked_engine import ForkedEngine, exit_as, tie_to_parent

_COMMANDS = {"prefill": WorkerRole.PREFILL, "decode": WorkerRole.DECODE, "worker": WorkerRole.BOTH}


class Server:
    def __init__(self, stack: socket.socket) -> None:
        self._stack = stack
        self._watched = selectors.DefaultSelector()
        self._watched.register(stack, selectors.EVENT_READ)
        self._ends: dict[int, int] = {}  # pid to what is readable once the process has ended

    def serve(self) -> None:
        """Until the stack has ended."""
        while True:
            for key, _ in self._watched.select():
                if key.fileobj is self._stack:
                    packet, fds, _, _ = socket.recv_fds(self._stack, MAX_BYTES, 2)
                    if not packet:
                        return
                    self._do(packet, fds)
                else:
                    self._tell_end(key.data)

    def _do(self, packet: bytes, fds: Sequence[int]) -> None:
        match decode(packet):
            case Fork() as asked:
                self._stack.send(encode(self._fork(asked, fds)))
            case Reap(pid):
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, 0)

    def _fork(self, asked: Fork, fds: Sequence[int]) -> Forked:
        own = os.getpid()
        try:
            if len(fds) < 2:
                return Forked(0, "the fork server has too many open files")
            pid = os.fork()
        except OSError as error:
            return Forked(0, str(error))
        finally:
            if os.getpid() == own:
                for fd in fds:
                    os.close(fd)
        if pid == 0:
            self._become_worker(asked, own, *fds)
        try:
            ended = os.pidfd_open(pid)
        except OSError as error:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return Forked(0, f"its end cannot be watched: {error}")
        self._ends[pid] = ended
        self._watched.register(ended, selectors.EVENT_READ, pid)
        return Forked(pid)

    def _tell_end(self, pid: int) -> None:
        ended = self._ends.pop(pid)
        self._watched.unregister(ended)
        os.close(ended)
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert found is not None  # noqa: S101 (it has ended)
        code = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
        self._stack.send(encode(Ended(pid, code)))

    def _become_worker(self, asked: Fork, parent: int, stdout: int, stderr: int) -> None:
        """Does not return."""
        code = 1
        try:
            tie_to_parent(asked.name, parent)
            os.dup2(stdout, 1)
            os.dup2(stderr, 2)
            for fd in (stdout, stderr, self._stack.fileno(), *self._ends.values()):
                os.close(fd)
            self._watched.close()
            if asked.cores:
                os.sched_setaffinity(0, asked.cores)
            code = run_worker(asked.name, asked.arguments)
        except BaseException:
            traceback.print_exc()
        finally:
            exit_as(code)


def run_worker(name: str, arguments: Sequence[str]) -> int:
    """`baton ARGUMENTS`, whose engine is a fork of this process. Returns the exit code."""
    command, *flags = arguments
    run = partial(worker_process.main, role=_COMMANDS[command], start_engine=ForkedEngine(f"{name}.engine").start)
    found = SettingsCommand(command, WORKER_SETTINGS, run, about="", examples=[]).main(
        flags, prog_name=f"baton {command}", standalone_mode=False
    )
    return found if isinstance(found, int) else 0


def why_no_forks() -> str:
    """Why this process can fork no worker; empty if it can."""
    if len(os.listdir("/proc/self/task")) > 1:
        return "a library has started a thread when it was imported"
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        return f"the end of a process cannot be watched: {error}"
    return ""


def main(model: str, cache_dir: str, fd: str) -> None:
    connector_class("shared_storage")  # others bring torch or begin threads: each engine imports its own
    with contextlib.suppress(BatonError):  # each worker says so itself
        read_simulated_model(ensure_model(model, cache_dir, lambda _: None))
    gc.collect()
    gc.freeze()  # what was imported is never garbage, and a look at it would copy its pages
    with socket.socket(fileno=int(fd)) as stack:
        stack.send(encode(Imported(reason := why_no_forks())))
        if not reason:
            Server(stack).serve()


if __name__ == "__main__":
    main(*sys.argv[1:])
