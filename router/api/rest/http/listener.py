"""The sockets that HTTP clients connect to.

A client whose host or network vanishes closes nothing. HTTP/1.1 has no pings, so the kernel has to notice. By
default that takes it a quarter of an hour, in which the request would be computed for nobody. Connections inherit
these settings from the socket that accepts them.

    nothing is sent    a probe after IDLE_S of silence, and then one every INTERVAL_S: TCP's keepalive
    tokens are sent    they are not acknowledged: TCP_USER_TIMEOUT (Linux), which ends the probing as well

A client that hangs while its host lives acknowledges what comes, until its buffers are full. One that then takes
nothing for GIVE_UP_S is given up too.
"""

from __future__ import annotations

import socket

from common.errors import StartupError
from common.process.unix_sockets import let_group_in, make_way, socket_path

IDLE_S = 10
INTERVAL_S = 5
GIVE_UP_S = 30  # since the client's host was last heard of


def listen(address: str, what: str = "REST", *, shared: bool = False) -> socket.socket:
    """A listening socket on `host:port`, or `unix:PATH`; port 0 takes a free one. A `shared` one gets its part of the
    connections, the others go to other processes of this user. Raises `StartupError`, which says `what` is listened
    for."""
    if (path := socket_path(address)) is not None:
        return _listen_unix(address, path, what)
    host, _, port = address.rpartition(":")
    try:
        infos = socket.getaddrinfo(
            host.strip("[]") or None, port_number(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, kind, protocol, _, target = infos[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if shared:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            _notice_the_vanished(listener)
            listener.bind(target)
            listener.listen(1024)
        except OSError:
            listener.close()
            raise
    except (OSError, ValueError) as error:
        raise StartupError(f"cannot listen on {address} for {what}: {error}") from error
    listener.setblocking(False)
    return listener


def port_number(port: str) -> int:
    """Raises `ValueError` for what is none: `getaddrinfo` would take a larger number modulo 65,536."""
    number = int(port)
    if not 0 <= number < 2**16:
        raise ValueError(f"there is no port {number}")
    return number


def _listen_unix(address: str, path: str, what: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        make_way(path)
        listener.bind(path)
        let_group_in(path)  # nobody can connect before the next line
        listener.listen(1024)
    except (OSError, ValueError) as error:
        listener.close()
        raise StartupError(f"cannot listen on {address} for {what}: {error}") from error
    listener.setblocking(False)
    return listener


def _notice_the_vanished(listener: socket.socket) -> None:
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {
        "TCP_KEEPALIVE": IDLE_S,  # macOS's name of the next one
        "TCP_KEEPIDLE": IDLE_S,
        "TCP_KEEPINTVL": INTERVAL_S,
        "TCP_KEEPCNT": max((GIVE_UP_S - IDLE_S) // INTERVAL_S, 1),
        "TCP_USER_TIMEOUT": GIVE_UP_S * 1000,
    }
    for name, value in options.items():
        if hasattr(socket, name):
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
