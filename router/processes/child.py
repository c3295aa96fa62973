"""One process of a router with several processes, as their parent sees it: its start, its messages, its end."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import socket
from dataclasses import dataclass, field
from multiprocessing.context import SpawnProcess

from common.config import RouterSettings
from common.errors import StartupError
from router.processes.member import SIGNALS, ProcessSpec
from router.processes.member import main as member_main
from router.processes.messages import Link
from router.reload import SettingsFile


@dataclass(slots=True, eq=False)
class Child:
    process: SpawnProcess
    link: Link
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    listens: bool = False
    is_ready: bool = False
    num_silent: int = 0  # seconds since its start or last sign of life, as this process counts them
    hung: bool = False
    reason: str = ""  # why it ends, in its own words or in ours
    turns: dict[int, asyncio.Task[None]] = field(default_factory=dict)  # requests that wait, or have a place
    asked: dict[int, asyncio.Future[list[bytes]]] = field(default_factory=dict)

    def why(self) -> str:
        code = self.process.exitcode
        ended = f"ended by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        return self.reason or ended

    def send_signal(self, number: signal.Signals) -> None:
        if self.process.pid is not None and self.process.is_alive():
            os.kill(self.process.pid, number)

    async def ended(self, timeout_s: float | None = None) -> None:
        """Returns when the process has ended, or when `timeout_s` has passed."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self.process.sentinel, ended.set)
        try:
            async with asyncio.timeout(timeout_s):
                await ended.wait()
        except TimeoutError:
            return
        finally:
            loop.remove_reader(self.process.sentinel)
        self.process.join()


async def start(settings: RouterSettings, file: SettingsFile | None, spec: ProcessSpec) -> Child:
    """Raises `StartupError`."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = multiprocessing.get_context("spawn").Process(
            target=member_main, args=(settings, file, spec, theirs), name=f"router-{spec.number + 1}"
        )
        # It has no handlers while Python starts. Signals wait until it has: `Member.takes_signals`.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            process.start()
        except OSError as error:
            ours.close()
            raise StartupError(f"a process of the router cannot be started: {error}") from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return Child(process, Link(*await asyncio.open_unix_connection(sock=ours)))
