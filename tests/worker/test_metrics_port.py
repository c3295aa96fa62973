"""What strangers can make a worker's /metrics hold."""

from __future__ import annotations

import contextlib
import socket
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from common.errors import StartupError
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


def scrape(server: MetricsServer) -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics", timeout=PATIENCE_S) as answer:
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
        assert b"baton_" in scrape(server)
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
