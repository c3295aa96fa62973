"""`baton profile --steps`, through a router and past it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from baton import AsyncClient
from baton.cli.main import main
from common.errors import (
    BatonError,
    ForbiddenError,
    IncompatibleError,
    OverloadedError,
)
from tests.router.conftest import RunningRouter, StartRouter
from tests.support.fake_worker import FakeWorker


async def profile(*arguments: str) -> int:
    return await asyncio.to_thread(main, ["profile", *arguments])


@pytest.mark.parametrize("is_direct", [False, True])
async def test_files_of_a_worker(
    router: RunningRouter,
    worker: FakeWorker,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    is_direct: bool,
) -> None:
    """Their names say which worker, and lead nowhere else, whatever the worker says."""
    way = "--direct" if is_direct else f"--router={router.grpc_address}"
    folder = tmp_path / "new"
    arguments = ["--steps=5", f"--worker={worker.address}", "--seconds=2", way, f"--out={folder}"]
    assert await profile(*arguments) == 0
    name = worker.address.replace(":", "-")
    assert {one.name: one.read_bytes() for one in folder.iterdir()} == {
        f"{name}.trace.json.gz": b"a trace",
        f"{name}...-engine.svg": b"<svg/>",
    }
    printed = capsys.readouterr()
    assert f"5 steps of {worker.address} in 2.000 s" in printed.out
    assert printed.err == "no front.svg\n"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--steps=5"], "--worker: is missing"),
        (["--worker=a:1"], "--steps: is missing"),
        (["--direct"], "--steps: is missing"),
        (["--steps=5", "--worker=a:1", "--minutes=3"], "--steps: asks a running worker"),
        (["--steps=501", "--worker=a:1"], "1<=x<=500"),
    ],
)
def test_the_two_purposes_stay_apart(arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", *arguments]) == 2
    assert line in capsys.readouterr().err


async def test_what_a_router_refuses(router: RunningRouter, worker: FakeWorker) -> None:
    async with AsyncClient(router.grpc_address, timeout=30) as client:
        with pytest.raises(BatonError, match="no worker of this router"):
            await client.profile_worker("10.0.0.1:1")
        worker.refuse = OverloadedError("a profile is being taken already", 7.0)
        with pytest.raises(OverloadedError, match="already") as caught:
            await client.profile_worker(worker.address)
        assert caught.value.retry_after_s == 7.0
        worker.refuse, worker.is_older = None, True
        with pytest.raises(IncompatibleError, match="version"):
            await client.profile_worker(worker.address)


async def test_operators_alone(worker: FakeWorker, start_router: StartRouter, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("sk-a name=a\nsk-o name=o operator=true\n")
    router = await start_router(worker, api_keys_file=str(tmp_path / "keys"))
    async with AsyncClient(router.grpc_address, timeout=30, api_key="sk-a") as client:
        with pytest.raises(ForbiddenError, match="operator"):
            await client.profile_worker(worker.address)
    async with AsyncClient(router.grpc_address, timeout=30, api_key="sk-o") as client:
        profile = await client.profile_worker(worker.address, num_steps=4)
    assert (profile.num_steps, profile.files["trace.json.gz"]) == (4, b"a trace")
