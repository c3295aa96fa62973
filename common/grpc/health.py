"""`grpc.health.v1.Health` of every port, whose watchers cannot hold it up: grpcio's own writes to them while it holds a
lock that changes of the status need, and anybody may watch.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

import grpc
from grpc_health.v1 import health_pb2

from common.grpc.options import MAX_HEALTH_CALLS

Context = grpc.aio.ServicerContext[object, object]
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
MAX_WATCHERS = MAX_HEALTH_CALLS // 2  # they never end; the other half of the calls is for those that check


class Health:
    def __init__(self) -> None:
        self._statuses: dict[str, int] = {}
        self._news = asyncio.Event()
        self._is_ending = False
        self._num_watchers = 0
        self.renew: Callable[[], None] = lambda: None
        """Called before each answer to a check, to set the current status: it may depend on things that change without
        notice."""

    def set(self, service: str, status: int) -> None:
        """The empty name is the server as a whole."""
        if not self._is_ending and self._statuses.get(service) != status:
            self._statuses[service] = status
            self._tell()

    def end(self) -> None:
        """From now on every status is NOT_SERVING, whatever is set later."""
        self._is_ending = True
        self._statuses = dict.fromkeys(self._statuses, NOT_SERVING)
        self._tell()

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def Check(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> health_pb2.HealthCheckResponse:
        self.renew()
        status = self._statuses.get(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service")
            raise AssertionError("abort always raises")
        return health_pb2.HealthCheckResponse(status=status)

    async def List(  # noqa: N802
        self, _request: health_pb2.HealthListRequest, _context: Context
    ) -> health_pb2.HealthListResponse:
        self.renew()
        statuses = {name: health_pb2.HealthCheckResponse(status=status) for name, status in self._statuses.items()}
        return health_pb2.HealthListResponse(statuses=statuses)

    async def Watch(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> AsyncGenerator[health_pb2.HealthCheckResponse, None]:
        if self._num_watchers >= MAX_WATCHERS:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MAX_WATCHERS} others watch, the most")
        told: int | None = None
        self._num_watchers += 1
        try:
            while True:
                news = self._news
                status = self._statuses.get(request.service, SERVICE_UNKNOWN)
                if status != told:
                    told = status
                    yield health_pb2.HealthCheckResponse(status=status)
                else:
                    await news.wait()
        finally:
            self._num_watchers -= 1
