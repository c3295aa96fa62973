"""A router, in as many processes as its settings ask for (`--processes`)."""

from __future__ import annotations

import sys

from common.config import RouterSettings
from common.errors import ConfigError, StartupError
from common.process.unix_sockets import socket_path
from router import server
from router.processes import parent
from router.reload import SettingsFile
from router.server import Ready


def run(settings: RouterSettings, ready: Ready, file: SettingsFile | None = None) -> None:
    """Runs until SIGTERM or SIGINT, and then until all requests have ended. Raises `StartupError`."""
    if settings.processes == 1:
        server.run(settings, ready, file)
        return
    if sys.platform != "linux":
        raise StartupError("processes: more than one needs Linux, which shares a port's connections between them")
    for field in ("http_listen", "grpc_listen"):
        if socket_path(getattr(settings, field)) is not None:
            raise ConfigError(field, "several processes share ports alone: a unix socket needs --processes 1")
    parent.run(settings, ready, file)
