"""Unix sockets that a process listens on, as an address `unix:PATH` names them (gRPC's spelling, `unix:///PATH` too).

The file of a process that was killed stays behind. It is removed if it is a socket and nobody listens there; anything
else is left alone, and is an error.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from pathlib import Path

MODE = 0o660  # whoever may write the file may connect: the user and the group


def socket_path(address: str) -> str | None:
    """None if `address` is no unix socket."""
    if not address.startswith("unix:"):
        return None
    path = address.removeprefix("unix:")
    return path.removeprefix("//") if path.startswith("///") else path


def make_way(path: str) -> None:
    """Removes the socket that a process left behind at `path`. Raises OSError if there is anything else, or somebody
    listens."""
    try:
        mode = Path(path).lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise OSError(errno.EEXIST, "there is a file that is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            Path(path).unlink(missing_ok=True)
            return
        except FileNotFoundError:
            return
        except (BlockingIOError, TimeoutError):
            pass  # it has more connections to accept than it can keep
    raise OSError(errno.EADDRINUSE, "another process listens there")


def let_group_in(path: str) -> None:
    os.chmod(path, MODE)


def remove(address: str) -> None:
    """After the end of whoever listened on `address`: removes the file, unless another process listens there by now.
    Does nothing if it is no unix socket."""
    path = socket_path(address)
    if path is not None:
        with contextlib.suppress(OSError):
            make_way(path)
