"""Processes of a local cluster: started with a log file each, in a namespace or not, and gone with their starter."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from baton.stack.processes import tethered

_HOLD = "while :; do sleep 3600 & wait $!; done"  # process 1 of the namespace; a shell reaps orphans while it waits


class Process:
    """One running program; its output goes to a file."""

    def __init__(self, name: str, argv: Sequence[str], log: Path, environ: Mapping[str, str] | None = None) -> None:
        self.name, self.log = name, log
        self._wrapped = argv[0] in ("nsenter", "unshare")
        self._log_start = log.stat().st_size if log.exists() else 0  # behind what an earlier process wrote
        with log.open("ab") as output:
            self.popen = subprocess.Popen(
                tethered(argv),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(environ) if environ is not None else None,
                start_new_session=True,
            )

    @property
    def running(self) -> bool:
        return self.popen.poll() is None

    def ready_line(self) -> str | None:
        """What the process said when it began to serve; None until then."""
        with self.log.open("rb") as log:
            log.seek(self._log_start)
            found = re.search(rb"^ready (.*)$", log.read(), re.MULTILINE)
        return None if found is None else found[1].decode()

    def pid(self) -> int:
        """Of the program itself, if this process is an `nsenter` or `unshare` around it."""
        children = Path(f"/proc/{self.popen.pid}/task/{self.popen.pid}/children").read_text().split()
        return int(children[0]) if self._wrapped and children else self.popen.pid

    def kill(self) -> None:
        if not self.running:  # its number may be another's by now
            return
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            os.kill(self.pid(), signal.SIGKILL)
        self.popen.kill()
        self.popen.wait()

    def tail(self, num_lines: int = 20) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-num_lines:])


class Namespaces:
    """Network, mount and PID namespaces of their own, for root. All that runs inside ends when `close` is called, and
    when this process dies."""

    def __init__(self, log_dir: Path) -> None:
        argv = ["unshare", "-n", "-m", "-p", "--fork", "--kill-child", "--mount-proc", "--propagation", "private"]
        self._holder = Process("namespaces", [*argv, "bash", "-c", _HOLD], log_dir / "namespaces.log")
        wait_until("the namespaces", lambda: self._holder.pid() != self._holder.popen.pid, 10)
        self.target = self._holder.pid()

    def command(self, *argv: str) -> list[str]:
        """`argv` as run inside."""
        return ["nsenter", "-t", str(self.target), "-n", "-m", "-p", "--", *argv]

    def shell(self, script: str) -> str:
        """Standard output. Raises RuntimeError if it fails."""
        done = subprocess.run(self.command("bash", "-euc", script), check=False, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"{script.strip()}: {done.stderr.strip()}")
        return done.stdout

    def close(self) -> None:
        self._holder.kill()


def wait_until(what: str, done: Callable[[], bool], timeout_s: float, processes: Sequence[Process] = ()) -> None:
    """Polls `done`. Raises RuntimeError when `timeout_s` passes or one of `processes` ends."""
    deadline = time.monotonic() + timeout_s
    while not done():
        for process in processes:
            if not process.running:
                raise RuntimeError(f"{process.name} ended:\n{process.tail()}")
        if time.monotonic() > deadline:
            logs = "\n".join(f"--- {process.name}\n{process.tail(5)}" for process in processes)
            raise RuntimeError(f"{what}: not there after {timeout_s:g} s\n{logs}")
        time.sleep(0.05)
