"""This side of `tests.faults.client_process`."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from baton.stack.processes import tethered
from tests.faults.client_process import Ask, Told
from tests.integration.stack import CALL_TIMEOUT_S, wait_for

_decoder = msgspec.json.Decoder(Told)


class ClientProcess:
    """Asks one request at a time; `told` is what it knows of it."""

    def __init__(self, command: Callable[[Sequence[str]], list[str]], log: Path) -> None:
        """`command` says how to run a program where the client should be."""
        self.log = log
        with log.open("ab") as errors:
            self._popen = subprocess.Popen(
                tethered(command([sys.executable, "-m", "tests.faults.client_process"])),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
        self.told = Told(num_tokens=0)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        return self._popen.poll() is None

    def ask(self, ask: Ask) -> None:
        self.told = Told(num_tokens=0)
        self._write(msgspec.json.encode(ask))

    def cancel(self) -> None:
        self._write(b'"cancel"')

    @property
    def pid(self) -> int:
        return self._popen.pid

    def outcome(self, timeout_s: float = CALL_TIMEOUT_S) -> Told:
        """Waits for the request's end."""
        wait_for("the client has its answer", lambda: self.told.outcome or not self.running, timeout_s)
        assert self.told.outcome, f"the client ended:\n{self.log.read_text()}"
        return self.told

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._popen.wait()
        self._thread.join()
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._popen.stdin.close()
        self._popen.stdout.close()

    def _write(self, line: bytes) -> None:
        assert self._popen.stdin is not None
        self._popen.stdin.write(line + b"\n")
        self._popen.stdin.flush()

    def _read(self) -> None:
        assert self._popen.stdout is not None
        for line in self._popen.stdout:
            if line.endswith(b"\n"):  # a client that was killed in mid-line has told that one nobody
                self.told = _decoder.decode(line)
