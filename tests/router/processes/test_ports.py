"""Ports that a router's processes share, and that nobody else gets."""

from __future__ import annotations

import contextlib
import socket

import pytest

from common.errors import StartupError
from router.api.rest.http.listener import listen
from router.processes.ports import held


def connections(listener: socket.socket) -> int:
    """That wait to be accepted; takes them."""
    num = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            listener.accept()[0].close()
            num += 1
    return num


def test_a_held_port_goes_to_those_who_share_it_and_to_nobody_else() -> None:
    with held("127.0.0.1:0", "http_listen") as address:
        port = int(address.rpartition(":")[2])
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
        with pytest.raises(StartupError, match="in use"):
            listen(address)
        with pytest.raises(StartupError, match="http_listen: cannot listen on"), held(address, "http_listen"):
            pass
        with listen(address, shared=True) as one, listen(address, shared=True) as other:
            clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(64)]
            counts = connections(one), connections(other)
            for client in clients:
                client.close()
            assert sum(counts) == 64
            assert min(counts) > 0
            with pytest.raises(StartupError), held(address, "http_listen"):
                pass
    with held(address, "http_listen"):
        pass


@pytest.mark.parametrize("shares", [False, True])
def test_a_port_that_another_program_has_is_an_error(shares: bool) -> None:
    """Even if that one would share it."""
    with listen("127.0.0.1:0", shared=shares) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with (
            pytest.raises(StartupError, match=f"grpc_listen: cannot listen on {address}"),
            held(address, "grpc_listen"),
        ):
            pass


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.1:x", "127.0.0.1:65536", "unix:/tmp/x"])
def test_what_is_no_port(address: str) -> None:
    with pytest.raises(StartupError, match="http_listen: cannot listen on"), held(address, "http_listen"):
        pass


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.1:x", "127.0.0.1:-1", "127.0.0.1:65536"])
def test_what_is_no_port_for_one_process(address: str) -> None:
    with pytest.raises(StartupError, match=f"cannot listen on {address} for REST"):
        listen(address)
