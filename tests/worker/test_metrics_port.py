"""A worker's /metrics: what it says of requests, and what strangers can make it hold."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families

from baton.stack.stack_plan import free_ports
from common.errors import StartupError
from common.types import WorkerRole
from tests.router.conftest import sample
from tests.worker.fronts import Front, front, read, request_of
from tests.worker.words import BLOCK_SIZE
from worker.metrics_port import MetricsServer, serve_metrics

PATIENCE_S = 60.0


@contextlib.contextmanager
def serving(**bounds: Any) -> Iterator[MetricsServer]:
    server = serve_metrics("127.0.0.1", 0, **bounds)
    yield server
    server.shutdown()
    server.server_close()


def connect(server: MetricsServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.server_port), timeout=PATIENCE_S)


def scrape(port: int, accept: str = "*/*") -> bytes:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        page: bytes = answer.read()
    return page


def until_open(server: MetricsServer, number: int) -> None:
    due = time.monotonic() + PATIENCE_S
    while server.num_open != number:
        assert time.monotonic() < due, f"{server.num_open} are open"
        time.sleep(0.005)


def test_silent_connections_keep_nobody_out() -> None:
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(serving(max_connections=4, max_open_s=3600.0))
        silent = [stack.enter_context(connect(server)) for _ in range(4)]
        until_open(server, 4)
        silent += [stack.enter_context(connect(server)) for _ in range(3)]
        for cut in silent[:3]:
            assert cut.recv(1) == b"", "the longest open one gives way"
        assert b"baton_" in scrape(server.server_port)
        until_open(server, 3)


def test_no_connection_stays_open() -> None:
    """Not even one that says a little now and then."""
    with serving(max_open_s=0.0) as server:
        with connect(server) as slow:
            slow.sendall(b"GET /metrics HTT")
            assert slow.recv(1) == b""
        until_open(server, 0)


def test_a_port_that_is_taken() -> None:
    with serving() as server, pytest.raises(StartupError, match="metrics_port: cannot bind"):
        serve_metrics("127.0.0.1", server.server_port)


COUNTED = {
    "here": ("baton_worker_prompts_total", {"place": "here"}),
    "remote": ("baton_worker_prompts_total", {"place": "remote"}),
    "prompt": ("baton_worker_prompt_tokens_total", {}),
    "output": ("baton_worker_output_tokens_total", {}),
    "queued": ("baton_worker_queue_seconds_count", {}),
}


def counted() -> dict[str, float]:
    return {what: sample(name, **labels) for what, (name, labels) in COUNTED.items()}


async def test_prompts_and_tokens_are_counted(prefill: Front, decode: Front) -> None:
    """Both workers count in this process."""
    before = counted()
    prompt = [7] * 9
    await read(decode.decode.Decode(request_of(prompt, [prefill], max_tokens=5)))
    await decode.settled()
    assert {what: number - before[what] for what, number in counted().items()} == {
        "here": 0, "remote": 1, "prompt": 2 * len(prompt), "output": 5, "queued": 2,
    }  # fmt: skip
    before = counted()
    await read(decode.decode.Decode(request_of(prompt, max_tokens=3)))
    await decode.settled()
    assert {what: number - before[what] for what, number in counted().items()} == {
        "here": 1, "remote": 0, "prompt": len(prompt), "output": 3, "queued": 1,
    }  # fmt: skip


async def test_vllm_s_names(tmp_path: Path, fake_engines: None) -> None:
    (port,) = free_ports(1)
    async with front(WorkerRole.DECODE, tmp_path, metrics_port=port, metrics_aliases="vllm", block_size=BLOCK_SIZE):
        page = await asyncio.to_thread(scrape, port)
        asked = await asyncio.to_thread(scrape, port, "application/openmetrics-text;version=1.0.0")
    found = {one.name: one for one in text_string_to_metric_families(page.decode())}
    assert {name for name in found if name.startswith("vllm:")} <= {
        one.name
        for one in openmetrics_families(asked.decode())  # type: ignore[no-untyped-call]
    }
    (info,) = found["vllm:cache_config_info"].samples
    assert info.labels == {"block_size": str(BLOCK_SIZE), "num_gpu_blocks": "1000", "engine": "0"}
    (tokens,) = found["vllm:generation_tokens"].samples
    assert tokens.labels == {"model_name": "fake", "engine": "0"}
    assert tokens.value == sample("baton_worker_output_tokens_total")
