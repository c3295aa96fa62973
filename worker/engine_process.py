"""Starts the engine's process, carries messages to and from it, and ends it. `engine_client` knows what the messages
mean."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Protocol

import msgspec
import zmq
import zmq.asyncio

from common.config import WorkerSettings
from common.errors import UnavailableError
from engine.process import END_LINE, Bootstrap

log = logging.getLogger(__name__)

ENGINE_MODULE = "engine.process"
STOP_TIMEOUT_S = 5.0  # until an engine that is told to end is killed, and until that is given up
_HUGE_PAGES = "glibc.malloc.hugetlb"

# For how long OpenMP's threads spin when they have no work, before they sleep: GNU's, which torch brings along, some 50
# us in place of 20 ms, Intel's 1 ms in place of 200. While they spin, neither the kernels' own threads nor another
# worker's can run on that core.
_SHORT_SPINS = {"GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "1"}


class Input(Protocol):
    """Standard input of a process."""

    def write(self, data: bytes, /) -> object: ...
    def close(self) -> None: ...


class Running(Protocol):
    """A process: what is used here of `asyncio.subprocess.Process`."""

    @property
    def pid(self) -> int: ...
    @property
    def stdin(self) -> Input | None: ...
    @property
    def returncode(self) -> int | None: ...
    async def wait(self) -> int: ...
    def kill(self) -> None: ...


StartEngine = Callable[[Mapping[str, str]], Awaitable[Running]]
"""Starts an engine's process, given its environment."""


class EngineProcess:
    def __init__(
        self,
        settings: WorkerSettings,
        name: str,
        model_dir: Path,
        worker_id: str,
        epoch: str,
        start: StartEngine | None = None,
    ) -> None:
        """`name` is the process's, in log lines. `start` is `start_process` if None."""
        self._settings = settings
        self._name = name
        self._model_dir = model_dir
        self._worker_id = worker_id
        self._epoch = epoch
        self._folder = ""
        self._start = start
        self._process: Running | None = None
        self._socket: zmq.asyncio.Socket | None = None

    async def start(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="baton-engine-")
        address = f"ipc://{self._folder}/engine.sock"
        self._socket = zmq.asyncio.Context.instance().socket(zmq.PAIR)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.SNDHWM, 0)  # commands are small, and bounded by admission
        self._socket.bind(address)
        bootstrap = Bootstrap(
            address=address,
            name=self._name,
            model_dir=str(self._model_dir),
            worker_id=self._worker_id,
            epoch=self._epoch,
            settings=self._settings.model_dump_json(),
        )
        self._process = await (self._start or start_process)(engine_environment(self._settings, os.environ))
        assert self._process.stdin is not None  # noqa: S101 (a pipe was asked for)
        self._process.stdin.write(msgspec.json.encode(bootstrap) + b"\n")

    @property
    def is_open(self) -> bool:
        """Whether something can be sent."""
        return self._socket is not None and not self._socket.closed

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    @property
    def pid(self) -> int:
        """Raises `UnavailableError` if it has ended."""
        if self._process is None or self._process.returncode is not None:
            raise UnavailableError("the engine is not running")
        return self._process.pid

    def send(self, message: bytes) -> None:
        if self._socket is None or self._socket.closed:
            raise UnavailableError("the engine is not running")
        self._socket.send(message)  # sent at once: the high-water mark is off

    async def receive(self) -> bytes:
        assert self._socket is not None  # noqa: S101 (the process has started)
        return await self._socket.recv()

    def connected(self) -> None:
        """Call when the engine has connected: removes the socket's name, which is not needed any more."""
        shutil.rmtree(self._folder, ignore_errors=True)

    async def ended(self) -> int:
        """Waits for the process to end. Returns its exit code."""
        assert self._process is not None  # noqa: S101 (the process has started)
        return await self._process.wait()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    async def stop(self) -> None:
        """Tells the process to end, by its standard input, and kills it if it does not. A process that is
        stuck in a system call of a dead file system ends only with that call, and is not waited for."""
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            assert process.stdin is not None  # noqa: S101
            with contextlib.suppress(OSError):  # it has just ended
                process.stdin.write(END_LINE.encode())
            process.stdin.close()
            try:
                async with asyncio.timeout(STOP_TIMEOUT_S):
                    await process.wait()
            except TimeoutError:
                log.warning("the engine did not end, killing it")
                process.kill()
                try:
                    async with asyncio.timeout(STOP_TIMEOUT_S):
                        await process.wait()
                except TimeoutError:
                    log.error("the engine was killed and does not end: a system call of its does not return")
        if self._socket is not None:
            self._socket.close()
        shutil.rmtree(self._folder, ignore_errors=True)


async def start_process(environment: Mapping[str, str]) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", ENGINE_MODULE,
        stdin=asyncio.subprocess.PIPE,
        env=environment,
        start_new_session=True,  # Ctrl-C goes to the front alone, which drains
    )  # fmt: skip


def engine_environment(settings: WorkerSettings, environ: Mapping[str, str]) -> dict[str, str]:
    """Environment of the engine's process: variables that its libraries read before any code of ours runs. `environ` is
    this process's.

    OpenMP's thread count; that its threads soon sleep when they have no work, unless the user says something else of
    that; and that the GNU C library's malloc asks for pages of 2 MiB. A decode step reads all weights,
    more than the processor has addresses of small pages at hand for: it takes 6 to 8 % less with large ones.
    """
    environment = dict(environ)
    if num_threads := settings.num_threads or len(settings.cpu_cores):
        environment["OMP_NUM_THREADS"] = str(num_threads)
    if "OMP_WAIT_POLICY" not in environment:
        environment = _SHORT_SPINS | environment
    tunables = environment.get("GLIBC_TUNABLES", "")
    if _HUGE_PAGES not in tunables:
        environment["GLIBC_TUNABLES"] = ":".join(filter(None, (tunables, f"{_HUGE_PAGES}=1")))
    return environment


def exit_words(code: int) -> str:
    return f"killed by signal {-code}" if code < 0 else f"exited with code {code}"
