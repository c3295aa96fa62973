"""What operators order of a router and its workers (`Client.admin`, `AsyncClient.admin`). Asks for an operator's key,
if the router asks for keys; without keys, for a call from the router's own machine. Errors are those of
`common.errors`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from google.protobuf.message import Message

from baton.client.profiles import profile_message, profile_of
from baton.client.report import Profile
from common.types import WorkerRole, WorkerState
from protos.baton.v1 import admin_pb2, admin_pb2_grpc, worker_pb2
from protos.convert import role_to_proto
from protos.messages import value_of

T = TypeVar("T")


@dataclass(slots=True, frozen=True, kw_only=True)
class Target:
    """Whom an order is for: exactly one of these."""

    worker: str = ""  # its address
    all_workers: bool = False
    router: bool = False  # the one that is asked, with all of its processes
    all: bool = False  # that router, and all workers


@dataclass(slots=True, frozen=True, kw_only=True)
class OrderResult:
    """What became of an order at one place."""

    address: str = ""  # of the worker; empty: the router
    error: str = ""  # why it was not carried out; empty if it was
    num_running: int = 0  # pause, set_role: requests (a router's) or streams (a worker's) that go on
    num_device_blocks: int = 0  # flush: KV blocks that were forgotten
    num_host_blocks: int = 0  # likewise, in host memory alone


@dataclass(slots=True, frozen=True, kw_only=True)
class RouterState:
    paused: bool = False
    num_requests: int = 0  # that run
    num_processes: int = 0
    log_level: str = ""


@dataclass(slots=True, frozen=True, kw_only=True)
class WorkerStanding:
    address: str
    role: WorkerRole | None = None
    state: WorkerState | None = None
    num_requests_running: int = 0
    num_requests_waiting: int = 0
    takes: WorkerRole | None = None  # of which role it takes work now; it may be one of both
    role_pinned: bool = False  # an operator chose that
    num_role_shifts: int = 0  # how often that has changed since the worker started


@dataclass(slots=True, frozen=True, kw_only=True)
class State:
    router: RouterState
    workers: tuple[WorkerStanding, ...] = ()


@dataclass(slots=True, frozen=True, kw_only=True)
class Aborted:
    num_requests: int = 0
    workers: tuple[str, ...] = ()  # on which requests of other routers were ended
    failures: tuple[OrderResult, ...] = ()  # workers that could not be asked


@dataclass(slots=True, frozen=True, kw_only=True)
class ReloadedFile:
    what: str
    path: str
    read_at: float  # when what is in use was read, in seconds since 1970
    error: str = ""  # why the file as it is now cannot be used


@dataclass(slots=True, frozen=True)
class _Order(Generic[T]):
    """A method of `AdminService`, what it is asked, and what is made of its answer."""

    method: str
    request: Message
    read: Callable[[Any], T]


Results = tuple[OrderResult, ...]


def _to(method: str, request: Message) -> _Order[Results]:
    """An order that is carried out in several places."""
    return _Order(method, request, lambda answer: tuple(value_of(one, OrderResult) for one in answer.results))


def _state() -> _Order[State]:
    return _Order("GetState", admin_pb2.GetStateRequest(), lambda answer: value_of(answer, State))


def _drain(worker: str, timeout_s: float | None) -> _Order[None]:
    return _Order("DrainWorker", admin_pb2.DrainWorkerRequest(worker=worker, timeout_s=timeout_s), lambda _: None)


def _pause(target: Target) -> _Order[Results]:
    return _to("Pause", admin_pb2.PauseRequest(target=_target(target)))


def _resume(target: Target) -> _Order[Results]:
    return _to("Resume", admin_pb2.ResumeRequest(target=_target(target)))


def _abort(request_id: str) -> _Order[Aborted]:
    request = admin_pb2.AbortRequestRequest(request_id=request_id)
    return _Order("AbortRequest", request, lambda answer: value_of(answer, Aborted))


def _flush_cache(target: Target) -> _Order[Results]:
    return _to("FlushCache", admin_pb2.FlushCacheRequest(target=_target(target)))


def _set_role(role: WorkerRole | None, target: Target) -> _Order[Results]:
    wanted = worker_pb2.WORKER_ROLE_UNSPECIFIED if role is None else role_to_proto(role)
    return _to("SetRole", admin_pb2.SetRoleRequest(target=_target(target), role=wanted))


def _set_log_level(level: str, target: Target) -> _Order[Results]:
    return _to("SetLogLevel", admin_pb2.SetLogLevelRequest(target=_target(target), level=level))


def _reload() -> _Order[tuple[ReloadedFile, ...]]:
    def read(answer: admin_pb2.ReloadResponse) -> tuple[ReloadedFile, ...]:
        return tuple(value_of(one, ReloadedFile) for one in answer.files)

    return _Order("Reload", admin_pb2.ReloadRequest(), read)


class Admin:
    def __init__(
        self,
        stub: admin_pb2_grpc.AdminServiceStub,
        ask: Callable[[Any, Message], Any],
        stream: Callable[[Any, Message], Iterator[worker_pb2.ProfilePart]],
    ) -> None:
        """`ask` and `stream` call a method of `stub`, and raise `BatonError`."""
        self._stub = stub
        self._ask = ask
        self._stream = stream

    def _give(self, order: _Order[T]) -> T:
        return order.read(self._ask(getattr(self._stub, order.method), order.request))

    def state(self) -> State:
        return self._give(_state())

    def drain(self, worker: str, timeout_s: float | None = None) -> None:
        """Has a worker end when it has finished what it has, or after `timeout_s`. That cannot be taken back."""
        self._give(_drain(worker, timeout_s))

    def pause(self, target: Target) -> Results:
        """No new work until `resume`; what runs goes on."""
        return self._give(_pause(target))

    def resume(self, target: Target) -> Results:
        return self._give(_resume(target))

    def abort(self, request_id: str) -> Aborted:
        return self._give(_abort(request_id))

    def set_role(self, role: WorkerRole | None, target: Target) -> Results:
        """Has workers of both roles take work of one, and pins it: no planner changes it. None: both again, and
        planners may."""
        return self._give(_set_role(role, target))

    def flush_cache(self, target: Target) -> Results:
        """Has workers forget their cached KV blocks, but for what the store has."""
        return self._give(_flush_cache(target))

    def set_log_level(self, level: str, target: Target) -> Results:
        return self._give(_set_log_level(level, target))

    def reload(self) -> tuple[ReloadedFile, ...]:
        """Has the router read its files again if they have changed. Returns what is in use then."""
        return self._give(_reload())

    def profile_worker(self, worker: str, *, num_steps: int = 0, timeout_s: float = 0.0) -> Profile:
        """See `Client.profile_worker`."""
        return profile_of(self._stream(self._stub.ProfileWorker, profile_message(worker, num_steps, timeout_s)))


class AsyncAdmin:
    """Each method does what that of `Admin` does."""

    def __init__(
        self,
        stub: admin_pb2_grpc.AdminServiceAsyncStub,
        ask: Callable[[Any, Message], Awaitable[Any]],
        stream: Callable[[Any, Message], AsyncIterator[worker_pb2.ProfilePart]],
    ) -> None:
        """`ask` and `stream` call a method of `stub`, and raise `BatonError`."""
        self._stub = stub
        self._ask = ask
        self._stream = stream

    async def _give(self, order: _Order[T]) -> T:
        return order.read(await self._ask(getattr(self._stub, order.method), order.request))

    async def state(self) -> State:
        return await self._give(_state())

    async def drain(self, worker: str, timeout_s: float | None = None) -> None:
        await self._give(_drain(worker, timeout_s))

    async def pause(self, target: Target) -> Results:
        return await self._give(_pause(target))

    async def resume(self, target: Target) -> Results:
        return await self._give(_resume(target))

    async def abort(self, request_id: str) -> Aborted:
        return await self._give(_abort(request_id))

    async def set_role(self, role: WorkerRole | None, target: Target) -> Results:
        return await self._give(_set_role(role, target))

    async def flush_cache(self, target: Target) -> Results:
        return await self._give(_flush_cache(target))

    async def set_log_level(self, level: str, target: Target) -> Results:
        return await self._give(_set_log_level(level, target))

    async def reload(self) -> tuple[ReloadedFile, ...]:
        return await self._give(_reload())

    async def profile_worker(self, worker: str, *, num_steps: int = 0, timeout_s: float = 0.0) -> Profile:
        parts = self._stream(self._stub.ProfileWorker, profile_message(worker, num_steps, timeout_s))
        return profile_of([part async for part in parts])


def _target(target: Target) -> admin_pb2.Target:
    message = admin_pb2.Target()
    if target.worker:
        message.worker = target.worker
    for name in ("all_workers", "router", "all"):
        if getattr(target, name):
            setattr(message, name, True)
    return message
