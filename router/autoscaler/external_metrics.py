"""`external.metrics.k8s.io/v1beta1`, as the API server's aggregator asks for it on behalf of HPAs.

Who may ask is decided before: the API server checks its own RBAC (`get external.metrics.k8s.io/METRIC` in the
namespace) and forwards with its front-proxy certificate; a connection without that certificate is refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable, Callable, MutableMapping
from datetime import UTC, datetime
from typing import Any
from urllib.parse import parse_qs, unquote

from common.errors import InvalidArgumentError, UnavailableError
from router.autoscaler import selector
from router.autoscaler.board import METRIC_NAMES, Board

GROUP_VERSION = "external.metrics.k8s.io/v1beta1"
ROOT = f"/apis/{GROUP_VERSION}"

Json = dict[str, object]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


def quantity(value: float) -> str:
    """The number as Kubernetes writes it: whole, or in thousandths, rounded up so that a small value is never 0."""
    milli = math.ceil(value * 1000 - 1e-6)
    return str(milli // 1000) if milli % 1000 == 0 else f"{milli}m"


def resource_list() -> Json:
    return {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": GROUP_VERSION,
        "resources": [
            {
                "name": name,
                "singularName": "",
                "namespaced": True,
                "kind": "ExternalMetricValueList",
                "verbs": ["get"],
            }
            for name in METRIC_NAMES
        ],
    }


def status(code: int, reason: str, message: str) -> tuple[int, Json]:
    return code, {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": message,
        "reason": reason,
        "code": code,
    }


class ExternalMetrics:
    """An ASGI application. Metrics exist in `namespace` alone."""

    def __init__(self, board: Board, namespace: str) -> None:
        self._board = board
        self._namespace = namespace

    def answer(self, method: str, path: str, query: str) -> tuple[int, Json]:
        """HTTP status and body. `path` and `query` as on the wire: clients differ in what they escape."""
        path = unquote(path).rstrip("/")
        if method not in ("GET", "HEAD"):
            return status(405, "MethodNotAllowed", f"{method} is not allowed")
        if path == ROOT:
            return 200, resource_list()
        parts = path.removeprefix(ROOT).split("/")
        if not path.startswith(ROOT + "/") or len(parts) != 4 or parts[1] != "namespaces":
            return status(404, "NotFound", f"nothing is served at {path}")
        namespace, name = parts[2], parts[3]
        if name not in METRIC_NAMES:
            return status(404, "NotFound", f"no metric {name!r}; there are {', '.join(METRIC_NAMES)}")
        try:
            requirements = selector.parse(parse_qs(query).get("labelSelector", [""])[0])
            notice = self._board.fresh()
        except InvalidArgumentError as error:
            return status(400, "BadRequest", error.message)
        except UnavailableError as error:
            return status(503, "ServiceUnavailable", error.message)
        timestamp = datetime.fromtimestamp(notice.unix_time, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        items = [
            {
                "metricName": reading.name,
                "metricLabels": dict(reading.labels),
                "timestamp": timestamp,
                "value": quantity(reading.value),
            }
            for reading in notice.readings()
            if reading.name == name
            and namespace == self._namespace
            and all(one.holds(reading.labels) for one in requirements)
        ]
        return 200, {
            "kind": "ExternalMetricValueList",
            "apiVersion": GROUP_VERSION,
            "metadata": {},
            "items": items,
        }

    async def __call__(self, scope: Scope, _receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        path = scope.get("raw_path") or scope["path"].encode()
        code, body = self.answer(scope["method"], path.decode("latin-1"), scope["query_string"].decode("latin-1"))
        text = json.dumps(body).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(text)).encode())]
        await send({"type": "http.response.start", "status": code, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else text})
