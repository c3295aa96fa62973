"""Fake engines that are forks of one process, which has imported all they need: that costs an engine that starts on its
own half a second of the processor, and there are hundreds of them."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import sys
from collections.abc import Mapping
from multiprocessing import forkserver
from multiprocessing.connection import Connection

from tests.support import fake_engine

CONTEXT = multiprocessing.get_context("forkserver")


def start_server() -> None:
    """The process that forks. It ends with this one."""
    CONTEXT.set_forkserver_preload(["tests.support.fake_engine", "tests.worker.forked_engine"])
    forkserver.ensure_running()


async def start_process(environment: Mapping[str, str]) -> ForkedEngine:
    """In place of `worker.engine_process.start_process`."""
    return ForkedEngine()


class ForkedEngine:
    """What `EngineProcess` uses of `asyncio.subprocess.Process`."""

    def __init__(self) -> None:
        reader, writer = CONTEXT.Pipe(duplex=False)
        with reader, writer:
            self._process = CONTEXT.Process(target=_run, args=(reader,))
            self._process.start()
            self.stdin = open(os.dup(writer.fileno()), "wb", buffering=0)  # noqa: SIM115
        self._ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(self._process.sentinel, self._end)
        self.returncode: int | None = None

    def _end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._process.sentinel)
        self._process.join()
        self.returncode = self._process.exitcode
        self.stdin.close()
        self._ended.set()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        self._process.kill()


def _run(stdin: Connection) -> None:
    os.setsid()
    sys.stdin = open(os.dup(stdin.fileno()))  # noqa: SIM115
    stdin.close()
    sys.exit(fake_engine.main())
