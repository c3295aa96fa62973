"""A real Prometheus (Debian's package `prometheus`), for tests that are skipped where there is none."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import yaml

PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")
WAIT_S = 60.0


class Prometheus:
    """Its HTTP API."""

    def __init__(self, url: str) -> None:
        self._url = url

    async def get(self, path: str, **parameters: str) -> Any:
        def ask() -> Any:
            with urllib.request.urlopen(
                f"{self._url}{path}?{urllib.parse.urlencode(parameters)}", timeout=10
            ) as answer:
                return json.load(answer)["data"]

        return await asyncio.to_thread(ask)

    async def value(self, query: str) -> float | None:
        """Of a query with one result at most; None if it has none."""
        found = (await self.get("/api/v1/query", query=query))["result"]
        assert len(found) <= 1, found
        return float(found[0]["value"][1]) if found else None

    async def until(self, query: str, wanted: Callable[[float | None], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not wanted(await self.value(query)):  # noqa: ASYNC110 (there is nothing to wait for but the next scrape)
                await asyncio.sleep(0.2)


@asynccontextmanager
async def prometheus(folder: Path, jobs: Sequence[Mapping[str, Any]], *features: str) -> AsyncIterator[Prometheus]:
    """Scrapes as `jobs` say (`scrape_configs`) while inside, with these experimental features on."""
    assert PROMETHEUS is not None
    config = folder / "prometheus.yaml"
    config.write_text(yaml.safe_dump({"scrape_configs": list(jobs)}))
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    flags = {
        "config.file": config,
        "storage.tsdb.path": folder / "data",
        "web.listen-address": address,
        "log.level": "warn",
        "enable-feature": ",".join(features),
    }
    with (folder / "log").open("wb") as log:
        command = [PROMETHEUS, *(f"--{name}={value}" for name, value in flags.items() if value)]
        process = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log)
    url = f"http://{address}"
    try:
        async with asyncio.timeout(WAIT_S):
            while not await asyncio.to_thread(_is_ready, url):
                assert process.returncode is None, (folder / "log").read_text()
                await asyncio.sleep(0.1)
        yield Prometheus(url)
    finally:
        process.kill()
        await process.wait()


def _is_ready(url: str) -> bool:
    """It listens before it answers."""
    try:
        with urllib.request.urlopen(f"{url}/-/ready", timeout=10):
            return True
    except OSError:
        return False
