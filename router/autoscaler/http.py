"""HTTP for people, probes and Prometheus; and the small server that both of the autoscaler's HTTP ports run on."""

from __future__ import annotations

import json
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import asdict

from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp

from common.errors import UnavailableError
from common.types import WorkerRole
from router.api.rest.http.listener import listen
from router.api.rest.http.protocol import Connections, LimitedProtocol
from router.api.rest.http.web_server import WebServer
from router.autoscaler.board import METRIC_NAMES, Board, Notice
from router.autoscaler.external_metrics import Receive, Scope, Send
from router.autoscaler.signals import ScaleDecision

MAX_CONNECTIONS = 256  # of one port: some scrapers, probes and API servers
HEAD_TIMEOUT_S = 10.0  # for a TLS handshake, and for a request's head


class Server(WebServer):
    """Listens at `address` when made, answers while `run` runs."""

    def __init__(
        self,
        address: str,
        app: ASGIApp,
        *,
        context: ssl.SSLContext | None = None,
        protocol: type[LimitedProtocol] | None = None,
        max_connections: int = MAX_CONNECTIONS,
        head_timeout_s: float = HEAD_TIMEOUT_S,
    ) -> None:
        self._socket = listen(address, "HTTP")
        at = self._socket.getsockname()  # a path, of a unix socket
        self.address = address if isinstance(at, str) else f"{address.rpartition(':')[0] or '127.0.0.1'}:{at[1]}"
        connections = Connections(max_connections, head_timeout_s)
        super().__init__(self._socket, app, connections, context, protocol=protocol, shutdown_s=1)

    async def close(self) -> None:
        self._socket.close()


class KnownNow(Collector):
    """The process's metrics. Of those that somebody scales by, only what the board knows now: a series that is gone is
    an error to an HPA behind Prometheus, which then leaves replicas as they are; a value that stays is believed."""

    def __init__(self, board: Board) -> None:
        self._board = board

    def collect(self) -> Iterator[Metric]:
        try:
            known = {reading.name for reading in self._board.fresh().readings()}
        except UnavailableError:
            known = set()
        for family in REGISTRY.collect():
            if family.name in known or family.name not in METRIC_NAMES:
                yield family


class StatusPage:
    """`/metrics`, `/healthz`, `/readyz` and `/decisions`. An ASGI application."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._metrics = KnownNow(board)

    def answer(self, path: str) -> tuple[int, str, bytes]:
        """Status, content type, body."""
        if path == "/metrics":
            return 200, CONTENT_TYPE_LATEST, generate_latest(self._metrics)
        if path == "/healthz":
            return 200, "text/plain", b"ok"
        try:
            notice = self._board.fresh()
        except UnavailableError as error:
            return (503 if path in ("/readyz", "/decisions") else 404), "text/plain", error.message.encode()
        if path == "/readyz":
            return 200, "text/plain", b"ok"
        if path != "/decisions":
            return 404, "text/plain", b"there are /metrics, /healthz, /readyz and /decisions"
        body: dict[str, object] = {
            "unix_time": round(notice.unix_time, 3),
            "decisions": _told(notice, notice.decisions),
            "signals": {one.name: one.value for one in notice.readings() if one.name != "baton_desired_replicas"},
        }
        if notice.advice:
            body["advice"] = _told(notice, notice.advice)
        if WorkerRole.BOTH in notice.decisions:
            body["roles"] = {
                "workers": [
                    {
                        "address": one.address,
                        "takes": one.role.value,
                        "pinned": one.is_pinned,
                        "shifts": one.num_shifts,
                        "requests": one.num_requests,
                    }
                    for one in notice.movable
                ],
                "shifts": [asdict(one) for one in notice.shifts],
            }
        return 200, "application/json", json.dumps(body).encode()

    async def __call__(self, scope: Scope, _receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        code, content_type, body = self.answer(scope["path"])
        headers = [(b"content-type", content_type.encode()), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": code, "headers": headers})
        await send({"type": "http.response.body", "body": body if scope["method"] != "HEAD" else b""})


def _told(notice: Notice, decisions: Mapping[WorkerRole, ScaleDecision]) -> dict[str, object]:
    return {
        role.value: {
            "desired": decision.desired,
            "needed": round(decision.needed, 3),
            "workers": notice.signals.of(role).num_workers,
            "reasons": decision.reasons,
        }
        for role, decision in decisions.items()
    }
