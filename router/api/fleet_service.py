"""`baton.v1.RouterService`: what operators ask a router."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable

import grpc

from common.errors import IncompatibleError, InvalidArgumentError, NotFoundError, UnavailableError
from common.finished_request import FinishedRequest
from common.grpc.calls import Context
from common.grpc.status import error_of_call
from common.types import WorkerState
from protos.baton.v1 import router_pb2, worker_pb2, worker_pb2_grpc
from protos.convert import role_to_proto, state_to_proto
from protos.messages import message_of
from router.api.api_keys import check_operator, visible_tenant
from router.api.audit_log import audited, note
from router.api.worker_views import WorkerView, WorkerViews
from router.fleet.endpoint import Endpoint
from router.fleet.registry import Registry
from router.running.known_requests import MAX_FINISHED

STATUS_TIMEOUT_S = 2.0
DEFAULT_REQUESTS = 50
MESSAGES_AT_ONCE = 16  # to make the message of a request takes some 60 us
PROFILE_TIMEOUT_S = 600.0  # more than a worker takes for the longest profile

LatestRequests = Callable[[int, str | None, str], Awaitable[list[FinishedRequest]]]
"""See `Gateway.latest_requests`."""


class FleetService:
    """Workers are asked by one call at a time: others that come meanwhile get what it gets."""

    def __init__(self, registry: Registry, views: WorkerViews, latest_requests: LatestRequests) -> None:
        self._registry = registry
        self._views = views
        self._latest_requests = latest_requests
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
        views, workers = await asyncio.gather(self._views.joined(), asyncio.gather(*asked))
        for worker in workers:
            _add_view(worker, views.get(worker.address) or WorkerView(worker.address))
        return router_pb2.GetFleetResponse(workers=workers)

    async def GetRequests(  # noqa: N802
        self, request: router_pb2.GetRequestsRequest, _context: grpc.aio.ServicerContext[object, object]
    ) -> router_pb2.GetRequestsResponse:
        if request.limit > MAX_FINISHED:
            raise InvalidArgumentError("limit", f"must be a number up to {MAX_FINISHED}")
        told = await self._latest_requests(request.limit or DEFAULT_REQUESTS, visible_tenant(), request.request_id)
        response = router_pb2.GetRequestsResponse()
        for start in range(0, len(told), MESSAGES_AT_ONCE):
            response.requests.extend(
                message_of(one, router_pb2.FinishedRequest) for one in told[start : start + MESSAGES_AT_ONCE]
            )
            await asyncio.sleep(0)  # others' turn
        return response

    async def ProfileWorker(  # noqa: N802
        self, request: router_pb2.ProfileWorkerRequest, context: Context
    ) -> AsyncGenerator[worker_pb2.ProfilePart, None]:
        """A trace says what a worker computes, and for how many: that is for operators alone."""
        async with audited("baton.v1.RouterService.ProfileWorker", context):
            note(worker=request.address, num_steps=request.profile.num_steps)
            check_operator("workers are profiled for")
            async for part in profile(self._registry, request):
                yield part


async def profile(
    registry: Registry, request: router_pb2.ProfileWorkerRequest
) -> AsyncGenerator[worker_pb2.ProfilePart, None]:
    """A profile of one worker. Raises `BatonError`."""
    address = request.address
    if address not in {endpoint.address for endpoint in registry.endpoints()}:
        raise NotFoundError(f"{address!r} is no worker of this router (`baton status` lists them)", field="address")
    stub = worker_pb2_grpc.WorkerServiceStub(registry.channel(address))
    try:
        async for part in stub.Profile(request.profile, timeout=PROFILE_TIMEOUT_S):
            yield part
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            raise IncompatibleError(f"{address} is of a version that takes no profiles") from error
        raise error_of_call(error.code().name, error.details() or "", error.trailing_metadata()) from error
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise UnavailableError(f"{address} is no worker of this router any more") from None


def _add_view(worker: router_pb2.FleetWorker, view: WorkerView) -> None:
    worker.breaker, worker.num_known_blocks = view.breaker, view.num_known_blocks
    worker.hit_rate, worker.tokens_per_second = view.hit_rate, view.tokens_per_second


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
