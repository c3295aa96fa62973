"""Profiles of a worker that serves: a trace of its engine's next steps, and flame graphs of its two processes.

    front ── ProfileSteps ──> engine, which runs torch's profiler around its next steps and writes a file
    py-spy beside each of the two, until the file is there

All files are in a folder that ends with the call, and go to the caller in parts: it need not see this machine's disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from common.errors import InvalidArgumentError, OverloadedError, UnavailableError
from engine import messages as m
from protos.baton.v1 import worker_pb2
from worker.engine_client import EngineClient

log = logging.getLogger(__name__)

DEFAULT_STEPS, MAX_STEPS = 20, 500
DEFAULT_TIMEOUT_S, MAX_TIMEOUT_S = 30.0, 300.0
PART_BYTES = 2**20
MAX_FILE_BYTES = 256 * 2**20  # of what is sent; a step has some hundred events of 20 bytes, compressed
SAMPLES_PER_S = 100
MIN_SAMPLED_S = 3.0  # py-spy takes a second to begin with, and a hundred samples say little
END_TIMEOUT_S = 30.0  # for py-spy to draw what it saw
TRACE, ENGINE, FRONT = "trace.json.gz", "engine.svg", "front.svg"


def find_py_spy() -> str | None:
    """Beside this Python, or on the path; None if it is not installed."""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.exists() else shutil.which("py-spy")


class Profiles:
    """One at a time."""

    def __init__(
        self,
        engine: EngineClient,
        find_sampler: Callable[[], str | None] = find_py_spy,
        min_sampled_s: float = MIN_SAMPLED_S,
    ) -> None:
        self._engine = engine
        self._find_sampler = find_sampler
        self._min_sampled_s = min_sampled_s
        self._is_taking = False

    async def take(self, request: worker_pb2.ProfileRequest) -> AsyncGenerator[worker_pb2.ProfilePart, None]:
        """Raises `InvalidArgumentError`, `OverloadedError` while another one is taken, and `UnavailableError` if the
        engine ends meanwhile."""
        num_steps = request.num_steps or DEFAULT_STEPS
        timeout_s = request.timeout_s or DEFAULT_TIMEOUT_S
        if num_steps > MAX_STEPS:
            raise InvalidArgumentError("num_steps", f"must be at most {MAX_STEPS}, not {num_steps}")
        if not (math.isfinite(timeout_s) and 0 < timeout_s <= MAX_TIMEOUT_S):
            raise InvalidArgumentError("timeout_s", f"must be a number of seconds, above 0 and up to {MAX_TIMEOUT_S:g}")
        if self._is_taking:
            raise OverloadedError("a profile of this worker is being taken already: one at a time", timeout_s)
        self._is_taking = True
        try:
            with tempfile.TemporaryDirectory(prefix="baton-profile-") as name:
                folder = Path(name)
                last = await self._taken(folder, num_steps, timeout_s)
                for file in (TRACE, ENGINE, FRONT):
                    for content in _parts(folder / file, last.notes.append):
                        yield worker_pb2.ProfilePart(file=file, content=content)
                yield last
        finally:
            self._is_taking = False

    async def _taken(self, folder: Path, num_steps: int, timeout_s: float) -> worker_pb2.ProfilePart:
        """Leaves the files in `folder`. Returns the last part."""
        last = worker_pb2.ProfilePart()
        started_at, samplers = time.monotonic(), list[_Sampler]()
        try:
            if (py_spy := self._find_sampler()) is None:
                last.notes.append("no flame graphs: py-spy is not installed where the worker runs (pip install py-spy)")
            else:
                for file, pid in ((ENGINE, self._engine.pid), (FRONT, os.getpid())):
                    try:
                        samplers.append(await _sample(py_spy, pid, folder / file, timeout_s + END_TIMEOUT_S))
                    except OSError as error:
                        last.notes.append(f"no {file}: py-spy cannot be started: {error.strerror}")
            profiled = await self._trace(num_steps, timeout_s, folder / TRACE)
            if samplers:
                await asyncio.sleep(self._min_sampled_s - (time.monotonic() - started_at))
            for sampler in samplers:
                if failure := await sampler.end():
                    last.notes.append(failure)
        finally:
            for sampler in samplers:
                sampler.kill()
            await asyncio.gather(*(sampler.process.wait() for sampler in samplers))
        last.num_steps, last.seconds = profiled.num_steps, profiled.seconds
        if profiled.failure:
            last.notes.append(f"no trace: {profiled.failure}")
        elif profiled.num_steps < num_steps:
            last.notes.append(f"the engine computed {profiled.num_steps} steps in {timeout_s:g} s, not {num_steps}")
        log.info("a profile was taken", extra={"num_steps": profiled.num_steps, "notes": "; ".join(last.notes)})
        return last

    async def _trace(self, num_steps: int, timeout_s: float, path: Path) -> m.StepsProfiled:
        asked = asyncio.ensure_future(self._engine.calls.profile(num_steps, timeout_s, str(path)))
        died = asyncio.create_task(self._engine.died.wait())
        try:
            await asyncio.wait({asked, died}, return_when=asyncio.FIRST_COMPLETED)
            if not asked.done():
                raise UnavailableError("the engine process ended while its steps were traced")
            return asked.result()
        finally:
            for task in (asked, died):
                task.cancel()
            await asyncio.gather(asked, died, return_exceptions=True)


def _parts(path: Path, note: Callable[[str], None]) -> Iterator[bytes]:
    """A file's bytes, if it is there and not too long."""
    if not path.exists():
        return
    if (num_bytes := path.stat().st_size) > MAX_FILE_BYTES:
        most = f"more than the {MAX_FILE_BYTES >> 20} that are sent: ask for fewer steps"
        note(f"no {path.name}: it has {num_bytes >> 20} MiB, {most}")
        return
    with path.open("rb") as file:
        while content := file.read(PART_BYTES):
            yield content


@dataclass(slots=True)
class _Sampler:
    """py-spy, which looks at one process until it is told to end."""

    process: asyncio.subprocess.Process
    path: Path

    async def end(self) -> str:
        """Waits for the picture. Returns why there is none; empty if there is."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGINT)
        try:
            async with asyncio.timeout(END_TIMEOUT_S):
                _, said = await self.process.communicate()
        except TimeoutError:
            return f"no {self.path.name}: py-spy did not end in {END_TIMEOUT_S:g} s"
        if self.process.returncode == 0 and self.path.exists():
            return ""
        lines = [line.strip() for line in said.decode(errors="replace").splitlines() if line.strip()]
        return f"no {self.path.name}: py-spy says: {lines[-1] if lines else self.process.returncode}"

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()


async def _sample(py_spy: str, pid: int, path: Path, most_s: float) -> _Sampler:
    """Raises `OSError` if it cannot be started."""
    process = await asyncio.create_subprocess_exec(
        *(py_spy, "record", "--pid", str(pid), "--output", str(path), "--format", "flamegraph"),
        *("--rate", str(SAMPLES_PER_S), "--duration", str(math.ceil(most_s))),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    return _Sampler(process, path)
