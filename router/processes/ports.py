"""Ports that several processes listen on, and nobody else.

Processes of one user may share a port if each asks for it (SO_REUSEPORT); the kernel gives each its part of the
connections. So two routers could share one by mistake. The parent therefore binds each port first without asking: that
fails if any other program has it. Then it lets its own processes join, and keeps its socket, which takes no
connection: the port stays taken while no process listens, and programs that do not ask to share it are refused.
"""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Iterator

from common.errors import StartupError
from router.api.rest.http.listener import port_number

_NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)  # `localhost` may name ::1 although the machine has no IPv6


@contextlib.contextmanager
def held(address: str, field: str) -> Iterator[str]:
    """Holds `host:port`, and yields it; with the port that the kernel chose if `port` is 0. Raises `StartupError`."""
    host, _, port = address.rpartition(":")
    with contextlib.ExitStack() as stack:
        try:
            taken = port_number(port)
            infos = socket.getaddrinfo(
                host.strip("[]") or None, taken, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
            last: OSError | None = None
            is_held = False
            for family, _, _, _, target in infos:
                try:
                    taken = taken or _free_port(family, str(target[0]))
                    stack.enter_context(_hold(family, (target[0], taken, *target[2:])))
                    is_held = True
                except OSError as error:
                    if error.errno not in _NOT_HERE:
                        raise
                    last = error
            if not is_held and last is not None:
                raise last
        except (OSError, ValueError) as error:
            raise StartupError(f"{field}: cannot listen on {address}: {error}") from error
        yield f"{host}:{taken}"


def _free_port(family: int, host: str) -> int:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _hold(family: int, target: tuple[object, ...]) -> socket.socket:
    holder = socket.socket(family, socket.SOCK_STREAM)
    try:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of an earlier router may linger
        holder.bind(target)
        # Two sockets bound with SO_REUSEADDR only conflict once one of them listens. This one stays bound afterwards.
        holder.listen(1)
        with contextlib.suppress(OSError):  # ENOTCONN, by the standard; it listens no more all the same
            holder.shutdown(socket.SHUT_RDWR)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    except OSError:
        holder.close()
        raise
    return holder
