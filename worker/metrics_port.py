"""Prometheus' /metrics over HTTP, in threads. Connections are bounded in number and time.

The standard library's server has a thread for each connection, for as long as its client likes. Here the connection
that is open longest gives way to a newcomer if there are too many, and none is open for longer than one scrape takes.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Iterable
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import REGISTRY, CollectorRegistry, make_wsgi_app

from common.errors import StartupError
from common.metric_page import OPENMETRICS, wants_openmetrics

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 32
MAX_OPEN_S = 10.0  # of a connection, from its first byte to its last


class _Handler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (the name is the standard library's)
        """Says nothing: a scrape is no event."""


# The library's default turns the colon of a sample's name into an underscore.
_NAMES_AS_THEY_ARE = f"{OPENMETRICS};version=1.0.0;escaping=allow-utf-8"


def _negotiating(app: WSGIApplication) -> WSGIApplication:
    """`app`, which compresses if that is asked, in the two formats of `common.metric_page`."""

    def negotiating(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        is_openmetrics = wants_openmetrics(environ.get("HTTP_ACCEPT", ""))
        return app({**environ, "HTTP_ACCEPT": _NAMES_AS_THEY_ARE if is_openmetrics else ""}, start_response)

    return negotiating


class MetricsServer(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def __init__(
        self,
        host: str,
        port: int,
        registry: CollectorRegistry = REGISTRY,
        *,
        max_connections: int = MAX_CONNECTIONS,
        max_open_s: float = MAX_OPEN_S,
    ) -> None:
        self._max_connections = max_connections
        self._max_open_s = max_open_s
        self.address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        self._lock = threading.Lock()
        self._open: dict[socket.socket, float] = {}  # since when, open longest first
        super().__init__((host, port), _Handler)
        self.set_app(_negotiating(make_wsgi_app(registry)))

    @property
    def num_open(self) -> int:
        return len(self._open)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            if len(self._open) >= self._max_connections:
                self._cut(next(iter(self._open)))
            self._open[request] = time.monotonic()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Called by `serve_forever`, twice a second."""
        with self._lock:
            due = time.monotonic() - self._max_open_s
            for late in [request for request, since in self._open.items() if since < due]:
                self._cut(late)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002
        log.debug("a scrape of the metrics failed", exc_info=True)

    def _cut(self, request: socket.socket) -> None:
        """Ends a connection. Its thread then ends by itself and closes the socket."""
        del self._open[request]
        with contextlib.suppress(OSError):  # it is closed already
            request.shutdown(socket.SHUT_RDWR)


def serve_metrics(
    host: str,
    port: int,
    registry: CollectorRegistry = REGISTRY,
    *,
    max_connections: int = MAX_CONNECTIONS,
    max_open_s: float = MAX_OPEN_S,
) -> MetricsServer:
    """Serves until the process ends. Raises `StartupError` if the port cannot be had."""
    try:
        server = MetricsServer(
            host.strip("[]") or "0.0.0.0", port, registry, max_connections=max_connections, max_open_s=max_open_s
        )
    except OSError as error:
        raise StartupError(f"metrics_port: cannot bind {port}: {error.strerror}") from error
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    log.info("metrics", extra={"url": f"http://{host}:{server.server_port}/metrics"})
    return server
