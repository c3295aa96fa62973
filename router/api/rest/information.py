"""What a router says of itself: its model, health, decisions, metrics and this API."""

from __future__ import annotations

import time

from fastapi import Request
from fastapi.responses import Response

from common import metric_aliases
from common.errors import InvalidArgumentError, NotFoundError
from common.metric_page import content_type, render, wants_openmetrics
from common.version import VERSION
from router.api.api_keys import visible_tenant
from router.api.rest.docs_page import docs_page
from router.api.rest.http.errors import json_response
from router.api.rest.metrics_page import MetricsPage, cache_facts
from router.fleet.served_model import ServedModel
from router.running.decisions import MAX_DECISIONS
from router.running.known_requests import MAX_FINISHED
from router.serving.gateway import Gateway

DEFAULT_LATEST = 50  # at /decisions and /requests


class InformationHandlers:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._started = int(time.time())
        self._metrics_page = MetricsPage(self._make_metrics)

    async def models(self, _request: Request) -> Response:
        served = self._gateway.admission.models().values()
        return json_response({"object": "list", "data": [self._described(model) for model in served]})

    async def model(self, request: Request) -> Response:
        return json_response(self._described(self._gateway.admission.served(request.path_params["model"])))

    def _described(self, model: ServedModel) -> dict[str, object]:
        return {
            "id": model.limits.model,
            "object": "model",
            "created": self._started,
            "owned_by": "baton",
            "max_model_len": model.limits.max_model_len,
        }

    async def health(self, _request: Request) -> Response:
        if reason := self._gateway.not_ready():
            return json_response({"status": "unavailable", "reason": reason}, status=503, headers={"Retry-After": "1"})
        return json_response({"status": "ok"})

    async def decisions(self, request: Request) -> Response:
        """A key sees the decisions of its tenant's requests, an operator's those of all."""
        made = await self._gateway.latest_decisions(_limit(request, MAX_DECISIONS), visible_tenant())
        return json_response({"decisions": made})

    async def requests(self, request: Request) -> Response:
        """Who sees what is as at `/decisions`."""
        told = await self._gateway.latest_requests(_limit(request, MAX_FINISHED), visible_tenant())
        return json_response({"requests": told})

    async def request(self, request: Request) -> Response:
        request_id = request.path_params["request_id"]
        told = await self._gateway.latest_requests(1, visible_tenant(), request_id)
        if not told:
            raise NotFoundError(f"request {request_id!r} is none of the last ones that ended", field="request_id")
        return json_response(told[0])

    async def version(self, _request: Request) -> Response:
        return json_response({"version": VERSION})

    async def docs(self, request: Request) -> Response:
        return Response(docs_page(request.app.openapi()), media_type="text/html")

    async def metrics(self, request: Request) -> Response:
        is_openmetrics = wants_openmetrics(request.headers.get("accept", ""))
        page = self._metrics_page.get(is_openmetrics=is_openmetrics)
        return Response(page, media_type=content_type(is_openmetrics=is_openmetrics))

    def _make_metrics(self, is_openmetrics: bool) -> bytes:
        families = self._gateway.process.metrics()
        if self._gateway.metrics_aliases == "vllm":
            registry = self._gateway.admission.registry
            families = metric_aliases.with_aliases(families, metric_aliases.ROUTER, lambda: cache_facts(registry))
        return render(families, is_openmetrics=is_openmetrics)


def _limit(request: Request, most: int) -> int:
    """Raises `InvalidArgumentError`."""
    given = request.query_params.get("limit", str(DEFAULT_LATEST))
    if not (given.isascii() and given.isdecimal() and len(given) <= 6 and 1 <= int(given) <= most):
        raise InvalidArgumentError("limit", f"must be a number from 1 to {most}")
    return int(given)
