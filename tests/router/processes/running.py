"""A router, of several processes or of one, as a process tree of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

CODE = """
import json, sys
import common.process.restarts, router.processes.parent
from common.config import RouterSettings
from baton.cli import serve
if __name__ == "__main__":
    try:
        exec(sys.argv[2])
        sys.exit(serve.router(RouterSettings(**json.loads(sys.argv[1])), file=None))
    except Exception as error:
        sys.exit(f"{type(error).__name__}: {error}")
"""
SETTINGS = {"processes": 2, "http_listen": "127.0.0.1:0", "grpc_listen": "127.0.0.1:0", "drain_timeout": 10}
REQUEST = {"prompt": "x", "max_tokens": 100}


@dataclass(slots=True)
class RunningProcesses:
    process: Process
    url: str
    grpc_address: str
    errors: bytes = b""

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def pids(self) -> list[int]:
        """Of the processes that listen; the parent is none of them."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [int(pid) for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]

    def client(self) -> httpx.AsyncClient:
        """It opens a connection for each request."""
        return httpx.AsyncClient(base_url=self.url, limits=httpx.Limits(max_keepalive_connections=0), timeout=30)

    async def metric(self, name: str, **labels: str) -> float:
        """Summed over all labels that are not given. 0 if there is none."""
        async with self.client() as client:
            page = (await client.get("/metrics")).text
        assert "pid=" not in page
        samples = [one for family in text_string_to_metric_families(page) for one in family.samples if one.name == name]
        return sum(one.value for one in samples if labels.items() <= one.labels.items())

    async def said(self, text: bytes, num: int = 1) -> None:
        """Returns when so many lines of its log have it."""
        assert self.process.stderr is not None
        async with asyncio.timeout(60):
            while num:
                line = await self.process.stderr.readline()
                assert line, "the router has ended"
                num -= text in line

    async def ended(self) -> int:
        _, errors = await asyncio.wait_for(self.process.communicate(), 60)  # of both pipes, or one stays open
        self.errors += errors
        return await self.process.wait()


def sockets(pid: int) -> int:
    """Open ones of a process."""
    folder = f"/proc/{pid}/fd"
    found = 0
    for name in os.listdir(folder):
        with contextlib.suppress(FileNotFoundError):
            found += os.readlink(f"{folder}/{name}").startswith("socket:")
    return found


async def start(before: str = "", **settings: object) -> Process:
    """`before` is run in the parent first."""
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        CODE,
        json.dumps({**SETTINGS, **settings}),
        before,
        stdout=PIPE,
        stderr=PIPE,
        start_new_session=True,
    )


@contextlib.asynccontextmanager
async def running(before: str = "", **settings: object) -> AsyncIterator[RunningProcesses]:
    async with _listening(await start(before, **settings)) as router:
        yield router


@contextlib.asynccontextmanager
async def running_with_file(path: Path, decode: str, processes: int = 1) -> AsyncIterator[RunningProcesses]:
    """`baton router` with a settings file, and one decode worker."""
    flags = [f"--processes={processes}", f"--decode={decode}", "--http-listen=127.0.0.1:0", "--grpc-listen=127.0.0.1:0"]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "baton", "router", f"--config={path}", *flags),
        stdout=PIPE,
        stderr=PIPE,
        start_new_session=True,
    )
    async with _listening(process) as router:
        yield router


@contextlib.asynccontextmanager
async def _listening(process: Process) -> AsyncIterator[RunningProcesses]:
    """It is ended afterwards, if the test has not done that."""
    try:
        assert process.stdout is not None
        ready = (await asyncio.wait_for(process.stdout.readline(), 120)).decode().split()
        if not ready:
            raise AssertionError((await process.communicate())[1].decode())
        assert ready[0] == "ready"
        fields = dict(word.split("=", 1) for word in ready[1:])
        yield RunningProcesses(process, fields["http"], fields["grpc"])
    finally:
        if process.returncode is None:
            process.terminate()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), 30)
        if process.returncode is None:
            process.kill()
        _, errors = await process.communicate()
        sys.stderr.write(errors.decode())
