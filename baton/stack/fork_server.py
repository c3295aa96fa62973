"""Workers of a stack that are forks of one process, which has imported all that they need: its stack's side.

    stack ──Fork──> fork server ──fork──> front of a worker ──fork──> its engine
          <──Imported, Forked, Ended──

So a worker costs neither the time of imports nor the memory of what was imported, and a hundred simulated ones fit into
one machine. Each still is two processes, which are killed, drained and started again one by one. Linux only.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from baton.stack.fork_messages import MAX_BYTES, Ended, Fork, Forked, Imported, Reap, decode, encode
from common.errors import StartupError

COMMAND = (sys.executable, "-m", "baton.stack.forked_workers")
_ANSWER_TIMEOUT_S = 20.0  # of a fork, which takes milliseconds; many other processes may be starting
_TETHER = str(Path(__file__).with_name("tether.py"))


class ForkedProcess:
    """What a stack's child is to the stack, for a process that is not its own child."""

    def __init__(self, server: ForkServer, pid: int, stdout: IO[bytes], stderr: IO[bytes]) -> None:
        self.pid = pid
        self.stdout: IO[bytes] | None = stdout
        self.stderr: IO[bytes] | None = stderr
        self._server = server
        self._code = -int(signal.SIGKILL)
        self._has_ended = threading.Event()
        self._is_reaped = False

    def ended(self, code: int) -> None:
        self._code = code
        self._has_ended.set()

    def wait_ended(self) -> None:
        """Returns once it has ended. Its pid is not another process's yet."""
        self._has_ended.wait()

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code; from now on its pid may be another process's. Raises `subprocess.TimeoutExpired`."""
        if not self._has_ended.wait(timeout):
            raise subprocess.TimeoutExpired("a forked worker", timeout or 0.0)
        if not self._is_reaped:
            self._is_reaped = True
            self._server.reap(self.pid)
        return self._code

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""
        return self.wait() if self._has_ended.is_set() else None


class ForkServer:
    def __init__(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        on_imported: Callable[[Imported], object],
        import_timeout_s: float,
    ) -> None:
        """Starts the server, which ends with this process, and its forks with it. `environ` is the workers'
        environment. Does not wait for its imports: another thread calls `on_imported` once they are done, or once it is
        clear that they never will be. Must run in the main thread: the kernel ties the server's life to the thread that
        started it. Raises `StartupError`."""
        self._imported: Imported | None = None
        self._on_imported = on_imported
        self._import_timeout_s = import_timeout_s
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._answers: queue.SimpleQueue[Forked] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._processes: dict[int, ForkedProcess] = {}  # by pid
        self._ended_early: dict[int, int] = {}  # codes by pid, of processes whose `Forked` is not read yet
        fd = str(theirs.fileno())
        tether = [sys.executable, "-I", "-S", _TETHER, str(os.getpid()), ""]
        with theirs:
            try:
                self._server = subprocess.Popen(  # noqa: S603 - our own command
                    [*tether, *command, fd],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    env=dict(environ),
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
            except OSError as error:
                raise StartupError(f"the workers' fork server cannot be started: {error}") from error
        self._reader = threading.Thread(target=self._read, name="fork-server", daemon=True)
        self._reader.start()

    @property
    def is_running(self) -> bool:
        return self._server.poll() is None

    @property
    def has_imported(self) -> bool:
        """Whether it has said what it can do. It may have ended since."""
        return self._imported is not None

    @property
    def can_fork(self) -> bool:
        return self._imported is not None and not self._imported.reason

    def start(self, name: str, arguments: Sequence[str], cores: Sequence[int] = ()) -> ForkedProcess:
        """A worker as `baton ARGUMENTS` would run it. Call it if it `can_fork`. Raises `StartupError`."""
        out, err = os.pipe(), os.pipe()
        try:
            socket.send_fds(self._socket, [encode(Fork(name, list(arguments), list(cores)))], [out[1], err[1]])
            answer = self._answers.get(timeout=_ANSWER_TIMEOUT_S)
        except OSError as error:
            answer = Forked(0, str(error))
        except queue.Empty:
            self._server.kill()  # an answer that comes later would be taken for the next one
            answer = Forked(0, f"nothing was forked for {_ANSWER_TIMEOUT_S:g} s")
        finally:
            os.close(out[1])
            os.close(err[1])
        stdout, stderr = open(out[0], "rb"), open(err[0], "rb")  # noqa: SIM115 (its readers close them)
        if not answer.pid:
            stdout.close()
            stderr.close()
            raise StartupError(f"{name} cannot be started: {answer.reason}")
        process = ForkedProcess(self, answer.pid, stdout, stderr)
        with self._lock:
            self._processes[answer.pid] = process
            code = self._ended_early.pop(answer.pid, None)
        if code is not None:
            process.ended(code)
        return process

    def reap(self, pid: int) -> None:
        with self._lock:
            self._processes.pop(pid, None)
        try:
            self._socket.send(encode(Reap(pid)))
        except OSError:
            return  # the server has ended, and with it all that it knew

    def close(self) -> None:
        """Ends the server, and with it what is left of its forks."""
        self._server.kill()
        self._server.wait()
        self._reader.join(_ANSWER_TIMEOUT_S)
        self._socket.close()

    def _read(self) -> None:
        self._socket.settimeout(self._import_timeout_s)
        while packet := self._receive():
            match decode(packet):
                case Imported() as imported:
                    self._socket.settimeout(None)
                    self._tell(imported)
                case Forked() as answer:
                    self._answers.put(answer)
                case Ended(pid, code):
                    with self._lock:
                        process = self._processes.get(pid)
                        if process is None:
                            self._ended_early[pid] = code
                    if process is not None:
                        process.ended(code)
        if self._imported is None:
            self._server.kill()  # it may still run
            self._tell(Imported(f"it ended, or imported for {self._import_timeout_s:g} s (--start-timeout)"))
        # Linux has killed all of its forks.
        self._answers.put(Forked(0, "the fork server has ended"))
        with self._lock:
            left = list(self._processes.values())
        for process in left:
            process.ended(-int(signal.SIGKILL))

    def _tell(self, imported: Imported) -> None:
        self._imported = imported
        self._on_imported(imported)

    def _receive(self) -> bytes:
        try:
            return self._socket.recv(MAX_BYTES)
        except OSError:
            return b""
