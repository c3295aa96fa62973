"""`baton.v1.AdminService`: what operators order of a router and its workers.

Orders for workers go through any router, since it is the worker that keeps what was ordered; orders for a router are of
the router that is called. Who may call is checked before (`audit_log.administration`), and each call is in the audit
log.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

from common.errors import BatonError, IncompatibleError, InvalidArgumentError, NotFoundError, UnavailableError
from common.grpc.calls import Context
from common.logs import LEVELS
from common.types import WorkerRole, WorkerState
from common.validation import check_request_id
from protos.baton.v1 import admin_pb2, router_pb2, worker_pb2
from protos.convert import role_of, role_to_proto, state_to_proto
from router.api.audit_log import note
from router.api.fleet_service import profile
from router.api.router_orders import ProcessState, RouterOrders
from router.api.worker_orders import Ask, WorkerOrders
from router.fleet.registry import Registry

TIMEOUT_S = 5.0  # of one worker
FLUSH_TIMEOUT_S = 15.0  # longer than it waits for its engine
WORKER, ALL_WORKERS, ROUTER, ALL = "worker", "all_workers", "router", "all"

T = TypeVar("T")
OrderRouter = Callable[[], Awaitable[admin_pb2.OrderResult]]


class HasTarget(Protocol):
    @property
    def target(self) -> admin_pb2.Target: ...


class AdminService:
    def __init__(self, registry: Registry, router: RouterOrders) -> None:
        self._registry = registry
        self._router = router
        self._workers = WorkerOrders(registry)

    async def GetState(  # noqa: N802
        self, _request: admin_pb2.GetStateRequest, _context: Context
    ) -> admin_pb2.GetStateResponse:
        states = await self._router.state()
        if not states:
            raise UnavailableError("no process of the router answered")
        router = admin_pb2.RouterState(
            paused=any(one.is_paused for one in states),
            num_requests=sum(one.num_requests for one in states),
            num_processes=len(states),
            log_level=states[0].log_level,
        )
        workers = [
            admin_pb2.WorkerStanding(
                address=one.address,
                role=role_to_proto(self._registry.configured_role(one.address)),
                state=state_to_proto(one.state),
                num_requests_running=one.load.num_requests_running,
                num_requests_waiting=one.load.num_requests_waiting,
                takes=role_to_proto(one.role),
                role_pinned=one.taken is not None and one.taken.is_pinned,
                num_role_shifts=one.taken.num_shifts if one.taken is not None else 0,
            )
            for one in self._registry.endpoints()
        ]
        return admin_pb2.GetStateResponse(router=router, workers=workers)

    async def DrainWorker(  # noqa: N802
        self, request: admin_pb2.DrainWorkerRequest, _context: Context
    ) -> admin_pb2.DrainWorkerResponse:
        timeout_s = request.timeout_s if request.HasField("timeout_s") else None
        note(worker=request.worker, **({} if timeout_s is None else {"timeout_s": timeout_s}))
        address = self._workers.check(request.worker, "worker")
        order = worker_pb2.DrainRequest(timeout_s=timeout_s)
        await self._workers.ask(address, lambda worker: worker.Drain(order, timeout=TIMEOUT_S))
        return admin_pb2.DrainWorkerResponse()

    async def Pause(self, request: admin_pb2.PauseRequest, _context: Context) -> admin_pb2.OrderResponse:  # noqa: N802
        order = worker_pb2.PauseWorkerRequest()

        async def on_router() -> admin_pb2.OrderResult:
            return _paused(await self._router.pause(is_paused=True))

        return await self._carry_out(
            request,
            lambda worker: worker.Pause(order, timeout=TIMEOUT_S),
            lambda said: admin_pb2.OrderResult(num_running=said.num_streams),
            on_router,
        )

    async def Resume(self, request: admin_pb2.ResumeRequest, _context: Context) -> admin_pb2.OrderResponse:  # noqa: N802
        order = worker_pb2.ResumeWorkerRequest()

        async def on_router() -> admin_pb2.OrderResult:
            return _paused(await self._router.pause(is_paused=False))

        return await self._carry_out(
            request,
            lambda worker: worker.Resume(order, timeout=TIMEOUT_S),
            lambda _: admin_pb2.OrderResult(),
            on_router,
        )

    async def AbortRequest(  # noqa: N802
        self, request: admin_pb2.AbortRequestRequest, _context: Context
    ) -> admin_pb2.AbortRequestResponse:
        request_id = request.request_id
        check_request_id(request_id)
        note(aborts=request_id)
        if num_requests := await self._router.abort(request_id):
            note(num_requests=num_requests)
            return admin_pb2.AbortRequestResponse(num_requests=num_requests)
        order = worker_pb2.AbortWorkRequest(request_id=request_id)
        answers = await self._workers.ask_all(
            self._workers.addresses(), lambda worker: worker.Abort(order, timeout=TIMEOUT_S)
        )
        response = admin_pb2.AbortRequestResponse()
        for answer in answers:
            if answer.said is None:
                response.failures.append(_failed(answer.address, answer.error))
            elif answer.said.num_streams:
                response.num_requests += answer.said.num_streams
                response.workers.append(answer.address)
        note(num_requests=response.num_requests, num_failed=len(response.failures))
        if not response.num_requests:
            words = f"{request_id!r} does not run in this router, nor on any worker"
            if response.failures:
                words += f" that answered; {len(response.failures)} did not: {response.failures[0].error}"
            raise NotFoundError(words, field="request_id")
        return response

    async def SetRole(self, request: admin_pb2.SetRoleRequest, _context: Context) -> admin_pb2.OrderResponse:  # noqa: N802
        role = role_of(request.role) if request.role else WorkerRole.BOTH
        if role is None:
            raise InvalidArgumentError("role", "must be prefill, decode or both")
        kind = _kind(request.target)
        note(target=request.target.worker or kind, role=role.value if request.role else "cleared")
        kinds = worker_pb2.SetWorkerRoleRequest
        pin = kinds.PIN_SET if request.role else kinds.PIN_CLEARED
        order = kinds(role=role_to_proto(role), pin=pin, reason="an operator's order")
        if role is WorkerRole.PREFILL and kind in (WORKER, ALL_WORKERS):
            self._check_some_decode_left(request.target)
        return await self._carry_out(
            request,
            lambda worker: worker.SetRole(order, timeout=TIMEOUT_S),
            lambda said: admin_pb2.OrderResult(num_running=said.num_streams),
        )

    def _check_some_decode_left(self, target: admin_pb2.Target) -> None:
        """Raises `IncompatibleError` if no worker that takes requests would be left beside the order's target."""
        named = {target.worker} if target.worker else {one.address for one in self._registry.endpoints()}
        if not any(
            one.can_decode and one.state is WorkerState.READY and one.address not in named
            for one in self._registry.endpoints()
        ):
            raise IncompatibleError("no ready worker would be left that takes requests")

    async def FlushCache(  # noqa: N802
        self, request: admin_pb2.FlushCacheRequest, _context: Context
    ) -> admin_pb2.OrderResponse:
        order = worker_pb2.FlushWorkerCacheRequest()
        response = await self._carry_out(
            request,
            lambda worker: worker.FlushCache(order, timeout=FLUSH_TIMEOUT_S),
            lambda said: admin_pb2.OrderResult(
                num_device_blocks=said.num_device_blocks, num_host_blocks=said.num_host_blocks
            ),
        )
        note(num_blocks=sum(one.num_device_blocks + one.num_host_blocks for one in response.results))
        return response

    async def SetLogLevel(  # noqa: N802
        self, request: admin_pb2.SetLogLevelRequest, _context: Context
    ) -> admin_pb2.OrderResponse:
        level = request.level
        if level not in LEVELS:
            raise InvalidArgumentError("level", f"must be one of {', '.join(LEVELS)}")
        note(level=level)
        order = worker_pb2.SetWorkerLogLevelRequest(level=level)

        async def on_router() -> admin_pb2.OrderResult:
            await self._router.order_level(level)
            return admin_pb2.OrderResult()

        return await self._carry_out(
            request,
            lambda worker: worker.SetLogLevel(order, timeout=TIMEOUT_S),
            lambda _: admin_pb2.OrderResult(),
            on_router,
        )

    async def Reload(self, _request: admin_pb2.ReloadRequest, _context: Context) -> admin_pb2.ReloadResponse:  # noqa: N802
        files = await self._router.reload()
        note(files=", ".join(one.what for one in files), num_failed=sum(bool(one.error) for one in files))
        return admin_pb2.ReloadResponse(
            files=[
                admin_pb2.ReloadedFile(what=one.what, path=one.path, read_at=one.read_at, error=one.error)
                for one in files
            ]
        )

    async def ProfileWorker(  # noqa: N802
        self, request: router_pb2.ProfileWorkerRequest, _context: Context
    ) -> AsyncGenerator[worker_pb2.ProfilePart, None]:
        note(worker=request.address, num_steps=request.profile.num_steps)
        async for part in profile(self._registry, request):
            yield part

    async def _carry_out(
        self,
        request: HasTarget,
        ask: Ask[T],
        told: Callable[[T], admin_pb2.OrderResult],
        on_router: OrderRouter | None = None,
    ) -> admin_pb2.OrderResponse:
        """Has the order's target carry it out. An order for one place alone fails with that place's error; others say
        which places failed. `told` makes a result of what a worker says; without `on_router` the order is for workers.
        """
        target = request.target
        kind = _kind(target)
        note(target=target.worker if kind == WORKER else kind)
        if on_router is None and kind in (ROUTER, ALL):
            raise InvalidArgumentError(f"target.{kind}", "this is for workers: set worker or all_workers")
        results = []
        if kind == WORKER:
            address = self._workers.check(target.worker, "target.worker")
            results.append(_of(address, told(await self._workers.ask(address, ask))))
        elif kind != ROUTER:
            for answer in await self._workers.ask_all(self._workers.addresses(), ask):
                if answer.said is None:
                    results.append(_failed(answer.address, answer.error))
                else:
                    results.append(_of(answer.address, told(answer.said)))
        if on_router is not None and kind == ROUTER:
            results.append(await on_router())
        elif on_router is not None and kind == ALL:
            try:
                results.append(await on_router())
            except BatonError as error:
                results.append(_failed("", error))
        if num_failed := sum(bool(one.error) for one in results):
            note(num_failed=num_failed, num_places=len(results))
        return admin_pb2.OrderResponse(results=results)


def _kind(target: admin_pb2.Target) -> str:
    """Raises `InvalidArgumentError`."""
    kind = target.WhichOneof("target")
    if kind is None:
        raise InvalidArgumentError("target", f"is missing: set {WORKER}, {ALL_WORKERS}, {ROUTER} or {ALL}")
    if not getattr(target, kind):
        raise InvalidArgumentError(f"target.{kind}", "must not be empty" if kind == WORKER else "must be true")
    return kind


def _of(address: str, result: admin_pb2.OrderResult) -> admin_pb2.OrderResult:
    result.address = address
    return result


def _failed(address: str, error: BatonError | None) -> admin_pb2.OrderResult:
    return admin_pb2.OrderResult(address=address, error=error.message if error else "it said nothing")


def _paused(states: Sequence[ProcessState]) -> admin_pb2.OrderResult:
    return admin_pb2.OrderResult(num_running=sum(one.num_requests for one in states))
