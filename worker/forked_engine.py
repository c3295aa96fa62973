"""An engine's process that is a fork of this one, in place of one that is started anew and imports all again.

Forks share what they have in common, so that many simulated workers fit into one machine. A process can be forked only
while it has one thread: neither an event loop, gRPC nor ZeroMQ may have begun. So the engine is forked before its front
begins, and waits for the front's first line.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Mapping

from common.errors import StartupError

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15


class _Pipe:
    def __init__(self, fd: int) -> None:
        self._file = open(fd, "wb", buffering=0)  # noqa: SIM115

    def write(self, data: bytes) -> None:
        """If nobody reads, the engine has ended, and `ForkedEngine.wait` tells it."""
        with contextlib.suppress(BrokenPipeError):
            self._file.write(data)

    def close(self) -> None:
        self._file.close()


class ForkedEngine:
    """What `EngineProcess` uses of `asyncio.subprocess.Process`. Linux only."""

    def __init__(self, name: str) -> None:
        """Forks. `name` is what `ps` shows, of which Linux keeps 15 characters."""
        reader, writer = os.pipe()
        own = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(writer)
            _become_engine(name, own, reader)
        os.close(reader)
        self.stdin = _Pipe(writer)
        self.returncode: int | None = None
        self._ended = asyncio.Event()

    async def start(self, environment: Mapping[str, str]) -> ForkedEngine:  # noqa: ARG002
        """In place of `worker.engine_process.start_process`; begins to watch for its end. The engine has the
        environment that it was forked with. Raises `StartupError`."""
        loop = asyncio.get_running_loop()
        try:
            ended = os.pidfd_open(self.pid)
        except OSError as error:
            self.kill()
            await asyncio.to_thread(os.waitpid, self.pid, 0)
            raise StartupError(f"the engine's end cannot be watched: {error}") from error

        def end() -> None:
            loop.remove_reader(ended)
            os.close(ended)
            _, status = os.waitpid(self.pid, 0)
            self.returncode = os.waitstatus_to_exitcode(status)
            self._ended.set()

        loop.add_reader(ended, end)
        return self

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.returncode is not None  # noqa: S101 (it has ended)
        return self.returncode

    def kill(self) -> None:
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)


def tie_to_parent(name: str, parent: int) -> None:
    """Makes this fork the leader of a session of its own, calls it `name`, and has Linux kill it when `parent`, which
    forked it, ends."""
    os.setsid()
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_NAME, name.encode())
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the line above
        os._exit(1)


def exit_as(code: int) -> None:
    """Ends this fork, without what its parent has planned for its own end."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _become_engine(name: str, parent: int, commands: int) -> None:
    """Does not return. `commands` becomes standard input."""
    from engine import process

    code = 1
    try:
        tie_to_parent(name, parent)
        os.dup2(commands, 0)
        os.close(commands)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
        code = process.main()
    except BaseException:
        traceback.print_exc()
    finally:
        exit_as(code)
