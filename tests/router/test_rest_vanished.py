"""A REST client whose host vanishes in mid-stream closes nothing, and its request ends all the same."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from router.api.rest.http import listener
from tests.faults import network as networks
from tests.faults.network import Network
from tests.router.conftest import StartRouter
from tests.support.fake_worker import FakeWorker

CLIENT = """
import json, sys, urllib.request
body = json.dumps({"messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 200})
request = urllib.request.Request(sys.argv[1], body.encode(), {"Content-Type": "application/json"})
for line in urllib.request.urlopen(request, timeout=600):
    print(line.decode().strip(), flush=True)
"""
DROP = "iptables -w -A INPUT -i admin -j DROP"


def test_accepted_connections_are_watched() -> None:
    with listener.listen("127.0.0.1:0") as listening, socket.create_connection(listening.getsockname()):
        listening.setblocking(True)
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            found = {
                name: accepted.getsockopt(socket.IPPROTO_TCP, getattr(socket, name))
                for name in ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")
                if hasattr(socket, name)
            }
    expected = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 30_000}
    assert found == {name: value for name, value in expected.items() if name in found}
    assert "TCP_KEEPINTVL" in found


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    if why := networks.why_not(tmp_path):
        pytest.skip(why)
    network = Network(tmp_path, ["client"])
    yield network
    network.close()


@pytest.mark.parametrize("is_silent", [True, False], ids=["between two tokens", "while tokens are sent"])
async def test_a_client_whose_packets_vanish_ends_its_request(
    network: Network, worker: FakeWorker, start_router: StartRouter, is_silent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, seconds in (("IDLE_S", 1), ("INTERVAL_S", 1), ("GIVE_UP_S", 4)):
        monkeypatch.setattr(listener, name, seconds)
    if is_silent:
        worker.hang_after = 2
    else:
        worker.answer, worker.delay_s = worker.answer * 20, 0.5
    router = await start_router(worker, http_listen="0.0.0.0:0")
    this_host, port = network.admin_host("client").rpartition(".")[0] + ".1", router.url.rpartition(":")[2]
    command = [sys.executable, "-c", CLIENT, f"http://{this_host}:{port}/v1/chat/completions"]
    client = await asyncio.create_subprocess_exec(*network.command("client", command), stdout=subprocess.PIPE)
    try:
        assert client.stdout is not None
        assert await client.stdout.readline()
        await asyncio.to_thread(subprocess.run, network.command("client", DROP.split()), check=True)
        await asyncio.wait_for(worker.cancelled.wait(), 60)  # the request itself would last longer
        assert client.returncode is None  # it has not heard of that
    finally:
        client.kill()
        await client.communicate()
