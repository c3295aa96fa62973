"""The fleet's load as it is streamed: by each worker its own, by each router what arrives."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field

import grpc

from common.batch_time import BatchTime, StepShape, chunk_shape
from common.grpc.transport import Channels
from common.process.tasks import VitalTasks
from common.types import WorkerLoad, WorkerRole, WorkerState
from protos.baton.v1 import demand_pb2, demand_pb2_grpc, worker_pb2, worker_pb2_grpc
from protos.convert import role_of, state_of
from protos.messages import value_of
from router.autoscaler.arrivals import ArrivalRate
from router.autoscaler.signals import FleetSignals, MovableWorker, RoleSignals
from router.fleet.discovery.base import Discovery, Found
from router.fleet.endpoint import RoleTaken
from router.fleet.patience import PATIENCE, Patience
from router.fleet.reports import reports, why_unread
from router.fleet.worker_info import batch_time_of

log = logging.getLogger(__name__)

STALE_S = 2.0  # workers and routers report at least once a second
RETRY_S = 0.5
INFO_TIMEOUT_S = 5.0
NUM_TIMES = 16  # models of a role that a planner is given: evenly picked, if there are more workers
CHUNK = 512  # tokens: the default of --chunk-size


@dataclass(slots=True, frozen=True)
class Totals:
    """Counted since some moment."""

    requests: int = 0
    prompt_tokens: int = 0
    answer_tokens: int = 0

    def plus(self, before: Totals, after: Totals) -> Totals:
        return Totals(
            self.requests + after.requests - before.requests,
            self.prompt_tokens + after.prompt_tokens - before.prompt_tokens,
            self.answer_tokens + after.answer_tokens - before.answer_tokens,
        )


class ModelTime:
    """What the planner asks of a worker's model of time."""

    def __init__(self, time: BatchTime) -> None:
        self._time = time

    def prompt_s(self, num_tokens: float) -> float:
        """In steps of `CHUNK`, each behind those before."""
        num = max(1, round(num_tokens))
        chunks = (chunk_shape(min(CHUNK, num - past), past) for past in range(0, num, CHUNK))
        return sum(self._time.seconds(shape) for shape in chunks)

    def decode_s(self, num_requests: float, context: float) -> float:
        num, longest = round(num_requests), max(1, round(context))
        shape = StepShape(num_decodes=num, decode_context=num * longest, longest_context=longest, num_head_rows=num)
        return self._time.seconds(shape)


@dataclass(slots=True)
class _FollowedWorker:
    found: Found
    load: WorkerLoad = field(default_factory=WorkerLoad)
    state: WorkerState = WorkerState.UNREACHABLE
    epoch: str = ""
    taken: RoleTaken | None = None  # None: it has but one role, or has not reported yet
    reported_at: float | None = None
    prompt_rate: float | None = None  # tokens/s, as its model of time says
    time: ModelTime | None = None  # that model
    model: tuple[str, int] | None = None  # epoch and version of that model
    ask_again_at: float = 0.0  # for a newer one of the same process

    def may_be_asked(self, load: worker_pb2.WorkerLoad) -> bool:
        """Whether it has another model than the one that is known, and was not asked a moment ago."""
        if self.model is None or self.model[0] != load.epoch:
            return True
        is_due = self.reported_at is not None and self.reported_at >= self.ask_again_at
        return is_due and self.model[1] != load.batch_time_version


@dataclass(slots=True)
class _FollowedRouter:
    arrivals: ArrivalRate
    epoch: str = ""
    num_held_requests: int = 0
    totals: Totals = Totals()  # as of its last report
    reported_at: float | None = None


@dataclass(slots=True, frozen=True)
class PodLoad:
    """One worker with a pod, for whoever decides which pod goes first."""

    pod: str
    num_streams: int  # requests and leases that its end would cut
    num_cached_blocks: int


class FleetLoad:
    """Follows workers and routers from `start` to `close`."""

    def __init__(
        self,
        prefill: Discovery,
        decode: Discovery,
        routers: Discovery,
        *,
        arrival_window_s: float,
        channels: Channels | None = None,
        vital: VitalTasks | None = None,
        clock: Callable[[], float] = time.monotonic,
        patience: Patience = PATIENCE,
    ) -> None:
        """`vital` is told what ends discovery, or the reading of one worker or router, if anything does."""
        self._clock = clock
        self._patience = patience
        self._vital = vital or VitalTasks()
        self._window_s = arrival_window_s
        self._channels = channels or Channels()
        self._workers: dict[WorkerRole, dict[str, _FollowedWorker]] = {WorkerRole.PREFILL: {}, WorkerRole.DECODE: {}}
        self._routers: dict[str, _FollowedRouter] = {}
        self._arrived = Totals()  # at all routers since each was first read
        self._sources = (prefill, decode, routers)
        self._followers = (
            _Followers(self._vital, prefill, lambda found: self._follow_worker(WorkerRole.PREFILL, found)),
            _Followers(self._vital, decode, lambda found: self._follow_worker(WorkerRole.DECODE, found)),
            _Followers(self._vital, routers, self._follow_router),
        )
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [self._vital.start(one.run(), name="follow the fleet") for one in self._followers]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ---------------------------------------------------------------------------------------- questions

    def signals(self) -> FleetSignals | None:
        """None until discovery has answered: an unknown fleet is not an empty one."""
        if not all(source.complete for source in self._sources):
            return None
        now = self._clock()
        fresh = [one for one in self._routers.values() if _is_fresh(one.reported_at, now)]
        both = self._both()
        movable = {one.found.address for one in both}
        rates = [rate for one in fresh if (rate := one.arrivals.rate()) is not None]
        return FleetSignals(
            prefill=self._role(self._taking(WorkerRole.PREFILL), now, movable),
            decode=self._role(self._taking(WorkerRole.DECODE), now, movable),
            both=RoleSignals(
                num_ready=sum(one.state is WorkerState.READY and _is_fresh(one.reported_at, now) for one in both),
                num_silent=sum(not _is_fresh(one.reported_at, now) for one in both),
            ),
            arrival_tokens_per_s=sum(rates) if rates else None,
            arrived_tokens=float(self._arrived.prompt_tokens) if rates else None,
            arrived_requests=float(self._arrived.requests) if rates else None,
            answered_tokens=float(self._arrived.answer_tokens) if rates else None,
            num_held_requests=sum(one.num_held_requests for one in fresh),
        )

    def movable(self) -> list[MovableWorker]:
        """Workers of both roles that report and are ready, in the order of their addresses."""
        now = self._clock()
        return [
            MovableWorker(
                address=one.found.address,
                role=one.taken.role,
                epoch=one.epoch,
                num_shifts=one.taken.num_shifts,
                is_pinned=one.taken.is_pinned,
                num_requests=one.load.num_requests_running + one.load.num_requests_waiting,
            )
            for one in sorted(self._both(), key=lambda one: one.found.address)
            if one.taken is not None and one.state is WorkerState.READY and _is_fresh(one.reported_at, now)
        ]

    def _both(self) -> list[_FollowedWorker]:
        """Workers that are listed for both roles."""
        decode = self._workers[WorkerRole.DECODE]
        return [worker for address, worker in self._workers[WorkerRole.PREFILL].items() if address in decode]

    def _taking(self, role: WorkerRole) -> list[_FollowedWorker]:
        """Workers of this role, without those that are listed for both and take work of the other one."""
        both = {one.found.address for one in self._both()}
        return [
            worker
            for address, worker in self._workers[role].items()
            if worker.taken is None or address not in both or worker.taken.role in (role, WorkerRole.BOTH)
        ]

    def pods(self, role: WorkerRole) -> list[PodLoad]:
        """The pods that report their load and are not on their way out."""
        now = self._clock()
        return [
            PodLoad(
                worker.found.pod,
                worker.load.num_requests_running + worker.load.num_requests_waiting + worker.load.num_leases,
                worker.load.num_cached_blocks,
            )
            for worker in (self._both() if role is WorkerRole.BOTH else self._workers[role].values())
            if worker.found.pod and _is_fresh(worker.reported_at, now) and worker.state is WorkerState.READY
        ]

    @staticmethod
    def _role(workers: Iterable[_FollowedWorker], now: float, movable: Collection[str]) -> RoleSignals:
        """`movable`: addresses of the workers of both roles."""
        workers = list(workers)
        fresh = [worker for worker in workers if _is_fresh(worker.reported_at, now)]
        ready = [worker for worker in fresh if worker.state is WorkerState.READY]
        loads = [worker.load for worker in ready]
        rates = [worker.prompt_rate for worker in ready if worker.prompt_rate is not None]
        times = [worker.time for worker in ready if worker.time is not None]
        return RoleSignals(
            times=tuple(times[:: math.ceil(len(times) / NUM_TIMES)]) if times and len(times) == len(ready) else (),
            predicted_rate=sum(rates) / len(rates) if rates and len(rates) == len(ready) else None,
            num_ready=len(loads),
            num_fixed=sum(worker.found.address not in movable for worker in ready),
            num_silent=len(workers) - len(fresh),
            num_requests=sum(load.num_requests_running + load.num_requests_waiting for load in loads),
            queued_tokens=sum(load.num_queued_prompt_tokens for load in loads),
            num_busy=sum(load.num_queued_prompt_tokens > 0 for load in loads),
            kv_used=sum(kv_usage(load) for load in loads),
        )

    # ---------------------------------------------------------------------------------------- following

    async def _follow_worker(self, role: WorkerRole, found: Found) -> None:
        worker = self._workers[role][found.address] = _FollowedWorker(found)

        async def read(channel: grpc.aio.Channel) -> None:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            call = stub.WatchLoad(worker_pb2.WatchLoadRequest())
            async with aclosing(reports(call, worker_pb2.WorkerLoad)) as loads:
                async for load in loads:
                    worker.load, worker.state = value_of(load, WorkerLoad), state_of(load.state)
                    worker.epoch, role = load.epoch, role_of(load.role)
                    worker.taken = None if role is None else RoleTaken(role, load.num_role_shifts, load.role_pinned)
                    worker.reported_at = self._clock()
                    if load.batch_time_version and worker.may_be_asked(load):
                        worker.ask_again_at = worker.reported_at + self._patience.model_s
                        info = await stub.GetInfo(worker_pb2.GetInfoRequest(), timeout=INFO_TIMEOUT_S)
                        time = batch_time_of(info)
                        worker.prompt_rate = None if time is None else prompt_rate(time)
                        worker.time = None if time is None else ModelTime(time)
                        worker.model = load.epoch, load.batch_time_version

        try:
            await _keep_reading(self._channels, found.address, read)
        finally:
            del self._workers[role][found.address]

    async def _follow_router(self, found: Found) -> None:
        router = self._routers[found.address] = _FollowedRouter(ArrivalRate(self._window_s))

        async def read(channel: grpc.aio.Channel) -> None:
            call = demand_pb2_grpc.DemandServiceStub(channel).WatchDemand(demand_pb2.WatchDemandRequest())
            async with aclosing(reports(call, demand_pb2.RouterDemand)) as demands:
                async for demand in demands:
                    totals = Totals(
                        demand.num_requests_total, demand.num_prompt_tokens_total, demand.num_output_tokens_total
                    )
                    if demand.epoch != router.epoch:
                        router.epoch, router.arrivals = demand.epoch, ArrivalRate(self._window_s)
                    else:
                        self._arrived = self._arrived.plus(router.totals, totals)
                    router.totals = totals
                    router.reported_at = self._clock()
                    router.arrivals.add(router.reported_at, demand.num_prompt_tokens_total)
                    router.num_held_requests = demand.num_requests_waiting

        try:
            await _keep_reading(self._channels, found.address, read)
        finally:
            del self._routers[found.address]


class _Followers:
    """One task for each address that discovery gives, for as long as it gives it."""

    def __init__(
        self, vital: VitalTasks, discovery: Discovery, follow: Callable[[Found], Coroutine[None, None, None]]
    ) -> None:
        self._vital = vital
        self._discovery = discovery
        self._follow = follow

    async def run(self) -> None:
        tasks: dict[Found, asyncio.Task[None]] = {}
        try:
            async with aclosing(self._discovery.watch()) as sets:
                async for current in sets:
                    for gone in set(tasks) - set(current):
                        tasks[gone].cancel()
                        with contextlib.suppress(asyncio.CancelledError):
                            await tasks.pop(gone)
                    for found in current:
                        if found not in tasks:
                            tasks[found] = self._vital.start(self._follow(found), name=f"follow {found.address}")
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)


async def _keep_reading(channels: Channels, address: str, read: Callable[[grpc.aio.Channel], Awaitable[None]]) -> None:
    """Runs `read` again and again, until cancelled."""
    problem = ""
    version, channel = channels.version, channels.open(address)
    try:
        while True:
            try:
                await read(channel)
                reason = "its stream ended"
            except (TimeoutError, grpc.aio.AioRpcError) as error:
                reason = why_unread(error)
            except Exception as error:  # one endpoint's odd answer must not end the reading of it
                log.exception("reading a load failed", extra={"address": address})
                reason = repr(error)
            if reason != problem:
                problem = reason
                log.warning("load is not reported", extra={"address": address, "reason": reason})
            await asyncio.sleep(RETRY_S)
            if channels.version != version:  # certificates changed: the next connection shows the new ones
                await channel.close()
                version, channel = channels.version, channels.open(address)
    finally:
        await channel.close()


def prompt_rate(time: BatchTime) -> float:
    """Prompt tokens that a worker computes in a second if it computes nothing else, in steps of `CHUNK`."""
    return CHUNK / time.seconds(chunk_shape(CHUNK, 0))


def _is_fresh(reported_at: float | None, now: float) -> bool:
    return reported_at is not None and now - reported_at <= STALE_S


def kv_usage(load: WorkerLoad) -> float:
    """The share of KV blocks in use, in [0, 1] whatever a worker says: one must not outweigh others."""
    if not load.num_blocks:
        return 0.0
    return max(0.0, (load.num_blocks - load.num_free_blocks - load.num_cached_blocks) / load.num_blocks)
