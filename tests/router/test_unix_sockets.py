"""REST and gRPC over unix sockets: who may connect, and what becomes of files that were there before."""

from __future__ import annotations

import asyncio
import socket
import stat
from pathlib import Path

import httpx
import pytest

from baton.client.sync_client import Client
from common.config import RouterSettings
from common.errors import ConfigError, StartupError
from router.run import run
from tests.router.conftest import StartRouter
from tests.support.fake_worker import ANSWER, FakeWorker

BODY = {"prompt": "x", "max_tokens": 99}


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("s")  # a socket's path has room for some hundred characters


def left_behind(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
        left.listen(1)


@pytest.mark.parametrize("is_left", [False, True])
async def test_both_interfaces(worker: FakeWorker, start_router: StartRouter, folder: Path, is_left: bool) -> None:
    http, grpc = folder / "http", folder / "grpc"
    if is_left:
        left_behind(http)
        left_behind(grpc)
    router = await start_router(worker, http_listen=f"unix:{http}", grpc_listen=f"unix:{grpc}")
    assert (router.url, router.grpc_address) == (f"unix:{http}", f"unix:{grpc}")
    for path in (http, grpc):
        assert stat.filemode(path.stat().st_mode) == "srw-rw----"
    transport = httpx.AsyncHTTPTransport(uds=str(http))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        answer = await client.post("/v1/completions", json=BODY)
        assert answer.json()["choices"][0]["text"] == ANSWER
        stream = await client.post("/v1/completions", json={**BODY, "stream": True})
        assert stream.text.endswith("data: [DONE]\n\n")
        large = await client.post("/v1/completions", content=b"x" * 8_000_000)
        assert large.status_code == 413

    def ask() -> str:
        with Client(f"unix:{grpc}") as direct:
            return direct.generate("x", max_tokens=99).result().text

    assert await asyncio.to_thread(ask) == ANSWER
    with pytest.raises(StartupError, match="another process listens there"):
        await start_router(worker, http_listen=f"unix:{http}")
    with pytest.raises(StartupError, match="another process listens there"):
        await start_router(worker, grpc_listen=f"unix:{grpc}")
    router.stop.set()
    await router.task
    assert not http.exists() and not grpc.exists()  # noqa: PT018


async def test_other_files_are_left_alone(worker: FakeWorker, start_router: StartRouter, folder: Path) -> None:
    (folder / "file").write_text("mine")
    for name in ("http_listen", "grpc_listen"):
        with pytest.raises(StartupError, match="no socket"):
            await start_router(worker, **{name: f"unix:{folder}/file"})
        assert (folder / "file").read_text() == "mine"
    for path in (folder / "missing" / "socket", folder / ("x" * 200)):
        with pytest.raises(StartupError, match="cannot listen on unix:"):
            await start_router(worker, http_listen=f"unix:{path}")


@pytest.mark.parametrize("field", ["http_listen", "grpc_listen"])
def test_several_processes_share_none(field: str) -> None:
    settings = RouterSettings.model_validate({field: "unix:/nowhere", "processes": 2})
    with pytest.raises(ConfigError, match=f"{field}: .*--processes 1"):
        run(settings, lambda *_: None)
