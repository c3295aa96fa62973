"""What operators order of a router and its workers (`Client.admin`). Asks for an operator's key, if the router asks for
keys; without keys, for a call from the router's own machine. Errors are those of `common.errors`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message

from baton.client.profiles import profile_message, profile_of
from baton.client.report import Profile
from common.types import WorkerRole, WorkerState
from protos.baton.v1 import admin_pb2, admin_pb2_grpc, worker_pb2
from protos.convert import role_to_proto
from protos.messages import value_of


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

    def state(self) -> State:
        return value_of(self._ask(self._stub.GetState, admin_pb2.GetStateRequest()), State)

    def drain(self, worker: str, timeout_s: float | None = None) -> None:
        """Has a worker end when it has finished what it has, or after `timeout_s`. That cannot be taken back."""
        self._ask(self._stub.DrainWorker, admin_pb2.DrainWorkerRequest(worker=worker, timeout_s=timeout_s))

    def pause(self, target: Target) -> tuple[OrderResult, ...]:
        """No new work until `resume`; what runs goes on."""
        return self._order(self._stub.Pause, admin_pb2.PauseRequest(target=_target(target)))

    def resume(self, target: Target) -> tuple[OrderResult, ...]:
        return self._order(self._stub.Resume, admin_pb2.ResumeRequest(target=_target(target)))

    def abort(self, request_id: str) -> Aborted:
        return value_of(
            self._ask(self._stub.AbortRequest, admin_pb2.AbortRequestRequest(request_id=request_id)), Aborted
        )

    def set_role(self, role: WorkerRole | None, target: Target) -> tuple[OrderResult, ...]:
        """Has workers of both roles take work of one, and pins it: no planner changes it. None: both again, and
        planners may."""
        wanted = worker_pb2.WORKER_ROLE_UNSPECIFIED if role is None else role_to_proto(role)
        return self._order(self._stub.SetRole, admin_pb2.SetRoleRequest(target=_target(target), role=wanted))

    def flush_cache(self, target: Target) -> tuple[OrderResult, ...]:
        """Has workers forget their cached KV blocks, but for what the store has."""
        return self._order(self._stub.FlushCache, admin_pb2.FlushCacheRequest(target=_target(target)))

    def set_log_level(self, level: str, target: Target) -> tuple[OrderResult, ...]:
        return self._order(self._stub.SetLogLevel, admin_pb2.SetLogLevelRequest(target=_target(target), level=level))

    def reload(self) -> tuple[ReloadedFile, ...]:
        """Has the router read its files again if they have changed. Returns what is in use then."""
        response = self._ask(self._stub.Reload, admin_pb2.ReloadRequest())
        return tuple(value_of(one, ReloadedFile) for one in response.files)

    def profile_worker(self, worker: str, *, num_steps: int = 0, timeout_s: float = 0.0) -> Profile:
        """See `Client.profile_worker`."""
        return profile_of(self._stream(self._stub.ProfileWorker, profile_message(worker, num_steps, timeout_s)))

    def _order(self, method: Any, request: Message) -> tuple[OrderResult, ...]:
        return tuple(value_of(one, OrderResult) for one in self._ask(method, request).results)


def _target(target: Target) -> admin_pb2.Target:
    message = admin_pb2.Target()
    if target.worker:
        message.worker = target.worker
    for name in ("all_workers", "router", "all"):
        if getattr(target, name):
            setattr(message, name, True)
    return message
