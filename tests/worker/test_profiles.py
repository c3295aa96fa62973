"""Profiles of a worker: files in parts, one at a time, and nothing left behind."""

from __future__ import annotations

import asyncio
import sys
from contextlib import aclosing
from pathlib import Path
from typing import cast

import grpc
import pytest

from common.errors import BatonError, OverloadedError, UnavailableError
from engine import messages as m
from protos.baton.v1 import worker_pb2
from tests.worker.conftest import StartWorker
from tests.worker.fronts import Front, until
from worker.engine_client import EngineClient
from worker.profiles import MAX_STEPS, PART_BYTES, Profiles

SAMPLER = """#!{python}
import os, signal, sys, time
path = sys.argv[sys.argv.index("--output") + 1]
signal.signal(signal.SIGINT, lambda *_: {fails} or (open(path, "w").write("<svg/>"), sys.exit(0)))
open({marks!r} + "/" + os.path.basename(path), "w").write(str(os.getpid()))
if {fails}:
    sys.exit("Error: Permission denied")
time.sleep(60)
"""


class FakeClient:
    """An `EngineClient` that has a trace when `done` is set."""

    def __init__(self, marks: Path | None, num_bytes: int = 10) -> None:
        self.pid = 1
        self.died = asyncio.Event()
        self.done = asyncio.Event()
        self.calls = self
        self._marks = marks  # where samplers say that they have begun
        self._num_bytes = num_bytes

    async def profile(self, num_steps: int, timeout_s: float, path: str) -> m.StepsProfiled:
        await self.done.wait()
        while self._marks is not None and len([*self._marks.iterdir()]) < 2:  # noqa: ASYNC110 (processes)
            await asyncio.sleep(0.01)
        Path(path).write_bytes(b"x" * self._num_bytes)  # noqa: ASYNC240
        return m.StepsProfiled(call_id=1, num_steps=num_steps, seconds=0.5)


@pytest.fixture
def marks(tmp_path: Path) -> Path:
    folder = tmp_path / "marks"
    folder.mkdir()
    return folder


def sampler(tmp_path: Path, marks: Path, *, fails: bool = False) -> str:
    path = tmp_path / "py-spy"
    path.write_text(SAMPLER.format(python=sys.executable, marks=str(marks), fails=fails))
    path.chmod(0o755)
    return str(path)


def profiles(client: FakeClient, py_spy: str | None = None) -> Profiles:
    return Profiles(cast("EngineClient", client), lambda: py_spy, min_sampled_s=0.0)


async def taken(profiles: Profiles, **fields: float) -> list[worker_pb2.ProfilePart]:
    async with aclosing(profiles.take(worker_pb2.ProfileRequest(**fields))) as parts:  # type: ignore[arg-type]
        return [part async for part in parts]


async def test_files_come_in_parts_and_the_last_part_says_the_rest(tmp_path: Path, marks: Path) -> None:
    client = FakeClient(marks, num_bytes=PART_BYTES + 1)
    client.done.set()
    parts = await taken(profiles(client, sampler(tmp_path, marks)), num_steps=7)
    assert [(part.file, len(part.content)) for part in parts] == [
        ("trace.json.gz", PART_BYTES),
        ("trace.json.gz", 1),
        ("engine.svg", 6),
        ("front.svg", 6),
        ("", 0),
    ]
    assert (parts[-1].num_steps, parts[-1].seconds, list(parts[-1].notes)) == (7, 0.5, [])


async def test_flame_graphs_are_left_out_with_a_reason(tmp_path: Path, marks: Path) -> None:
    client = FakeClient(None)
    client.done.set()
    (_, last) = await taken(profiles(client))
    assert [note.split(":")[0] for note in last.notes] == ["no flame graphs"]
    client = FakeClient(marks)
    client.done.set()
    (_, last) = await taken(profiles(client, sampler(tmp_path, marks, fails=True)))
    assert list(last.notes) == [f"no {name}.svg: py-spy says: Error: Permission denied" for name in ("engine", "front")]
    (_, last) = await taken(profiles(client, str(tmp_path / "none")))
    assert ["cannot be started" in note for note in last.notes] == [True, True]


async def test_one_at_a_time(tmp_path: Path) -> None:
    client = FakeClient(None)
    both = profiles(client)
    first = asyncio.create_task(taken(both))
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError, match="already"):
        await taken(both)
    client.done.set()
    assert (await first)[-1].num_steps
    assert (await taken(both))[-1].num_steps


async def test_an_engine_that_ends_meanwhile(tmp_path: Path) -> None:
    client = FakeClient(None)
    one = profiles(client)
    client.died.set()
    with pytest.raises(UnavailableError, match="ended"):
        await taken(one)
    client.died.clear()
    client.done.set()
    assert await taken(one)


async def test_who_leaves_leaves_nothing_behind(tmp_path: Path, marks: Path) -> None:
    one = profiles(FakeClient(marks), sampler(tmp_path, marks))
    task = asyncio.create_task(taken(one))
    await until(lambda: len([mark for mark in marks.iterdir() if mark.read_text()]) == 2, "both are sampled")
    pids = [int(mark.read_text()) for mark in marks.iterdir()]  # noqa: ASYNC240
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: not any(Path(f"/proc/{pid}/cmdline").exists() for pid in pids), "the samplers have ended")


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"num_steps": MAX_STEPS + 1}, "num_steps"),
        ({"timeout_s": -1}, "timeout_s"),
        ({"timeout_s": 1e9}, "timeout_s"),
        ({"timeout_s": float("nan")}, "timeout_s"),
    ],
)
async def test_what_is_refused(fields: dict[str, float], field: str) -> None:
    with pytest.raises(BatonError) as caught:
        await taken(profiles(FakeClient(None)), **fields)
    assert caught.value.field == field


async def test_a_worker_is_asked_over_grpc(start_worker: StartWorker) -> None:
    worker = await start_worker()
    parts = [part async for part in worker.worker.Profile(worker_pb2.ProfileRequest(num_steps=3), timeout=60)]
    assert (parts[0].file, parts[0].content) == ("trace.json.gz", b"a trace")
    assert parts[-1].num_steps == 3


async def test_the_engine_hears_that_nobody_waits(prefill: Front) -> None:
    """A fake engine has no steps for 999 ms or less."""
    call = prefill.worker.Profile(worker_pb2.ProfileRequest(num_steps=3, timeout_s=0.999))
    await until(lambda: prefill.told("ProfileSteps"), "the engine is asked")
    with pytest.raises(grpc.aio.AioRpcError, match="already"):
        _ = [part async for part in prefill.worker.Profile(worker_pb2.ProfileRequest(), timeout=60)]
    call.cancel()
    await until(lambda: prefill.told("EndProfile"), "the engine is told")
