"""`baton.v1.RouterService`: what operators ask a router."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

import grpc

from common.errors import InvalidArgumentError
from common.finished_request import FinishedRequest
from common.types import WorkerState
from protos.baton.v1 import router_pb2, worker_pb2, worker_pb2_grpc
from protos.convert import role_to_proto, state_to_proto
from protos.messages import message_of
from router.api.api_keys import visible_tenant
from router.fleet.endpoint import Endpoint
from router.fleet.registry import Registry
from router.fleet.track_record import Traffic
from router.processes.process_query import ProcessQuery
from router.processes.router_process import RouterProcess
from router.running.finished import MAX_FINISHED

STATUS_TIMEOUT_S = 2.0
DEFAULT_REQUESTS = 50

LatestRequests = Callable[[int, str | None, str], Awaitable[list[FinishedRequest]]]
"""See `Gateway.latest_requests`."""
BREAKERS = ("closed", "half open", "slow", "open")  # what keeps more requests away comes later


@dataclass(slots=True, frozen=True)
class WorkerView:
    """What one process of a router knows of a worker."""

    address: str
    breaker: str
    num_known_blocks: int
    prompt_tokens: float
    cached_tokens: float
    output_tokens: float


class FleetService:
    """Workers are asked by one call at a time: others that come meanwhile get what it gets."""

    def __init__(self, registry: Registry, process: RouterProcess, latest_requests: LatestRequests) -> None:
        self._registry = registry
        self._process = process
        self._latest_requests = latest_requests
        self._query = ProcessQuery("workers", WorkerView, self._views)
        process.answers(self._query)
        self._asking: asyncio.Task[router_pb2.GetFleetResponse] | None = None

    async def GetFleet(  # noqa: N802
        self, _request: router_pb2.GetFleetRequest, _context: grpc.aio.ServicerContext[object, object]
    ) -> router_pb2.GetFleetResponse:
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask())
        return await asyncio.shield(self._asking)

    async def _ask(self) -> router_pb2.GetFleetResponse:
        asked = [
            ask_worker(endpoint, self._registry.info(endpoint.address), self._registry.channel(endpoint.address))
            for endpoint in self._registry.endpoints()
        ]
        views, workers = await asyncio.gather(self._process.ask(self._query), asyncio.gather(*asked))
        for worker in workers:
            _add_views(worker, [view for view in views if view.address == worker.address])
        return router_pb2.GetFleetResponse(workers=workers)

    async def GetRequests(  # noqa: N802
        self, request: router_pb2.GetRequestsRequest, _context: grpc.aio.ServicerContext[object, object]
    ) -> router_pb2.GetRequestsResponse:
        if request.limit > MAX_FINISHED:
            raise InvalidArgumentError("limit", f"must be a number up to {MAX_FINISHED}")
        told = await self._latest_requests(request.limit or DEFAULT_REQUESTS, visible_tenant(), request.request_id)
        return router_pb2.GetRequestsResponse(requests=[message_of(one, router_pb2.FinishedRequest) for one in told])

    def _views(self, _limit: int, _tenant: str | None, _which: str) -> list[WorkerView]:
        now, registry = time.monotonic(), self._registry
        views = []
        for endpoint in registry.endpoints():
            traffic = registry.track.traffic(endpoint.incarnation, now)
            views.append(
                WorkerView(
                    endpoint.address,
                    registry.track.state(endpoint.incarnation, now),
                    registry.blocks.index.num_blocks(endpoint.address),
                    traffic.prompt,
                    traffic.cached,
                    traffic.output,
                )
            )
        return views


def _add_views(worker: router_pb2.FleetWorker, views: Iterable[WorkerView]) -> None:
    """Joins the views of all processes: what they sent there is summed, and the breaker told is the one that lets least
    through."""
    traffic = Traffic()
    worker.breaker = BREAKERS[0]
    for view in views:
        worker.breaker = max(worker.breaker, view.breaker, key=BREAKERS.index)
        worker.num_known_blocks = max(worker.num_known_blocks, view.num_known_blocks)
        traffic.prompt += view.prompt_tokens
        traffic.cached += view.cached_tokens
        traffic.output += view.output_tokens
    worker.hit_rate, worker.tokens_per_second = traffic.hit_rate, traffic.tokens_per_second


async def ask_worker(
    endpoint: Endpoint, info: worker_pb2.WorkerInfo | None, channel: grpc.aio.Channel
) -> router_pb2.FleetWorker:
    worker = router_pb2.FleetWorker(address=endpoint.address, info=info, role=role_to_proto(endpoint.role))
    if info is not None:
        worker.info.ClearField("batch_time")  # some kilobytes of each worker
    stub = worker_pb2_grpc.WorkerServiceStub(channel)
    try:
        status = await stub.GetStatus(worker_pb2.GetWorkerStatusRequest(), timeout=STATUS_TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        worker.state = state_to_proto(WorkerState.UNREACHABLE)
        worker.integrity = f"not known: {error.code().name}"
        return worker
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        worker.state = state_to_proto(WorkerState.UNREACHABLE)  # its channel was closed meanwhile
        worker.integrity = "not known: it is no worker of this router any more"
        return worker
    worker.load.CopyFrom(status.load)
    worker.state, worker.integrity = status.load.state, status.integrity
    if status.HasField("batch_time"):
        worker.batch_time.CopyFrom(status.batch_time)
    if endpoint.state is WorkerState.UNREACHABLE:  # it answers, but requests go to those that report themselves
        worker.state = state_to_proto(WorkerState.UNREACHABLE)
        worker.integrity = f"{status.integrity}; not used: it has not reported to this router yet"
    elif endpoint.excluded:
        worker.integrity = f"{status.integrity}; not used: {endpoint.excluded}"
    return worker
