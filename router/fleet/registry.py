"""The workers that a router knows: connected, watched, and described as `Endpoint` values.

Each configured address has one channel (`WorkerChannels`) and one task that watches it (`WorkerWatch`). A worker whose
stream ends or falls silent is UNREACHABLE until it answers again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import grpc
from prometheus_client import Gauge

from common import metrics
from common.errors import ModelNotFoundError, UnavailableError
from common.grpc.transport import Channels
from common.process.tasks import VitalTasks
from common.types import WorkerRole, WorkerState, request_tag
from protos.baton.v1 import worker_pb2, worker_pb2_grpc
from protos.convert import role_of
from router.fleet.block_watch import BlockWatch
from router.fleet.endpoint import Endpoint
from router.fleet.fleet import Fleet
from router.fleet.patience import PATIENCE, Patience
from router.fleet.served_model import ServedModel, ask_for_model
from router.fleet.track_record import TrackRecord
from router.fleet.worker import Sent, WorkerRecord
from router.fleet.worker_channels import WorkerChannels
from router.fleet.worker_watch import WorkerWatch

log = logging.getLogger(__name__)


class Registry:
    """`start` returns at once; `changed` lets others wait for news.

    Addresses are those given, until `set_addresses` says otherwise.
    """

    def __init__(
        self,
        prefill: Sequence[str],
        decode: Sequence[str],
        channels: Channels | None = None,
        vital: VitalTasks | None = None,
        patience: Patience = PATIENCE,
    ) -> None:
        """`vital` is told if a worker is not watched any more, by a defect: its process should end."""
        self._channels = WorkerChannels(channels or Channels())
        self._vital = vital or VitalTasks()
        self._patience = patience
        self._workers: dict[str, WorkerRecord] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._num_running: Counter[str] = Counter()  # requests, by address; of former workers too, while they have any
        self._gauges: dict[str, Gauge] = {}  # of `_num_running`
        self._started = False
        self._sweeping: asyncio.Task[None] | None = None
        self._news = asyncio.Event()
        self._adopting = asyncio.Lock()
        self._fleet = Fleet()
        self._changed: set[str] = set()  # addresses of workers that `_fleet` is to be told of
        self.models: dict[str, ServedModel] = {}  # by name: the one that is served, once a decode worker has answered
        self.blocks = BlockWatch(patience)
        self.track = TrackRecord(lambda reason: metrics.router_suspensions.labels(reason).inc())
        self._watch = WorkerWatch(
            self.blocks, self._channels, self._learn, self._set_state, self._role_changed, patience
        )
        self.set_addresses(prefill, decode)

    def start(self) -> None:
        self._started = True
        self._sweeping = self._vital.start(self.blocks.sweep(), name="blocks of former workers")
        self.set_addresses(
            [worker.address for worker in self._workers.values() if worker.role is not WorkerRole.DECODE],
            [worker.address for worker in self._workers.values() if worker.role is not WorkerRole.PREFILL],
        )

    def set_addresses(self, prefill: Sequence[str], decode: Sequence[str]) -> None:
        """Replaces the list of workers. A worker that is not named any more gets no new request, and its running
        requests go on. A worker that changed its role counts as another worker."""
        before = self._workers
        self._workers = {}
        for address in dict.fromkeys((*decode, *prefill)):
            role = WorkerRole.DECODE if address in decode else WorkerRole.PREFILL
            if address in decode and address in prefill:
                role = WorkerRole.BOTH
            known = before.get(address)
            if known is None or known.role is not role:
                known = WorkerRecord(address, role, self._channels.open(address), self._channels.version, self._changed)
            self._workers[address] = known
        for worker in before.values():
            if self._workers.get(worker.address) is not worker:
                self._retire(worker)
        for worker in self._workers.values() if self._started else ():
            if worker.address not in self._tasks:
                name = f"watch {worker.address}"
                self._tasks[worker.address] = self._vital.start(self._watch.run(worker), name=name)
        self._find_needed()
        self._fleet = Fleet(self.endpoints())
        self._measure_context()
        self._count_states()
        self._tell()

    def _retire(self, worker: WorkerRecord) -> None:
        if task := self._tasks.pop(worker.address, None):
            task.cancel()
        self.count_requests(worker.address, 0)
        if self._started:
            self._channels.close_when_idle(worker)

    async def close(self) -> None:
        tasks = [*self._tasks.values(), *([self._sweeping] if self._sweeping else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._channels.close()
        for worker in self._workers.values():
            await worker.channel.close()

    # ---------------------------------------------------------------------------------------- questions

    def endpoints(self) -> list[Endpoint]:
        """All workers in configured order, decode workers first."""
        now = time.monotonic()
        return [self._endpoint(worker, now) for worker in self._workers.values()]

    def fleet(self) -> Fleet:
        """The same workers, for decisions: only those are looked at that may have changed since the last time. To be
        used at once."""
        now = time.monotonic()
        for incarnation in self.track.troubled(now):
            self._changed.add(incarnation[0])
        for address in self._changed:
            if (worker := self._workers.get(address)) is not None:
                self._fleet.update(self._endpoint(worker, now))
        self._changed.clear()
        return self._fleet

    def _endpoint(self, worker: WorkerRecord, now: float) -> Endpoint:
        return worker.endpoint(self._excluded(worker), self.track.suspended(worker.incarnation, now))

    def info(self, address: str) -> worker_pb2.WorkerInfo | None:
        """None if the worker never answered."""
        return self._workers[address].info

    def configured_role(self, address: str) -> WorkerRole:
        return self._workers[address].role

    def channel(self, address: str) -> grpc.aio.Channel:
        return self._workers[address].channel

    @property
    def model(self) -> ServedModel | None:
        """The model that is served; None until a decode worker has answered."""
        return next(iter(self.models.values()), None)

    def served(self, name: str = "") -> ServedModel:
        """The model of this name; if the name is empty, the one that is served. Raises `UnavailableError`, with the
        reason, while nothing can be served, `ModelNotFoundError` if this model is not."""
        if reason := self.not_ready():
            raise UnavailableError(reason)
        model = self.models.get(name) if name else self.model
        if model is None:
            names = ", ".join(map(repr, self.models))
            raise ModelNotFoundError(f"{name!r} is not served here; this is {names}", field="model")
        return model

    def not_ready(self) -> str:
        """Why no request can be served now; empty if requests can be served."""
        if self.model is not None and any(
            group.example.can_decode and group.example.state is WorkerState.READY and not group.example.excluded
            for group in self.fleet().groups
        ):
            return ""
        reasons = [f"{e.address}: {self._why_not(e)}" for e in self.endpoints() if e.can_decode]
        return f"no decode worker is ready ({'; '.join(reasons) or 'none is configured'})"

    def reconnect_wait_s(self) -> float:
        """How long a request that finds no decode worker should wait for one, in seconds; 0 if no decode worker was
        lost lately.

        A router that stood still (a paused machine) finds all its connections broken when it goes on, and has new ones
        a moment later. Time counts from when the router noticed a loss, so the pause does not count.
        """
        lost_after = time.monotonic() - self._patience.lost_lately_s
        is_back_soon = any(
            worker.role is not WorkerRole.PREFILL
            and worker.state is WorkerState.UNREACHABLE
            and worker.lost_at > lost_after
            and not self._excluded(worker)
            for worker in self._workers.values()
        )
        return self._patience.reconnect_wait_s if is_back_soon else 0.0

    def _why_not(self, endpoint: Endpoint) -> str:
        if endpoint.excluded:
            return endpoint.excluded
        problem = self._workers[endpoint.address].problem
        if endpoint.state is WorkerState.READY:
            return problem or "its tokenizer is being loaded"
        return f"{endpoint.state.value}, {problem}" if problem else endpoint.state.value

    async def changed(self, timeout_s: float) -> None:
        """Returns after the next change of any worker's state, or after `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._news.wait()

    def sending(
        self, tokens: Mapping[str, int], request_id: str = "", slack_s: float | None = None, num_context: int = 0
    ) -> contextlib.AbstractContextManager[None]:
        """Counts a request as running on these workers, and as load until they report it themselves. `tokens`: by
        address, how many prompt tokens the worker computes. `request_id`: as workers get it; empty if it is sent to
        them by somebody else. `slack_s`: `RoutingDecision.slack_s`. `num_context`: tokens that the request begins
        with, whoever computes their KV."""
        tag = request_tag(request_id) if request_id else None
        workers = [(self._workers[one], num) for one, num in tokens.items() if one in self._workers]
        return _Sending(self, workers, tag, slack_s, num_context)

    def count_requests(self, address: str, change: int) -> None:
        """Updates the metric of running requests. A former worker's address leaves the metric with its last request."""
        self._num_running[address] = num = self._num_running[address] + change
        if (gauge := self._gauges.get(address)) is None:
            gauge = self._gauges[address] = metrics.router_endpoint_requests.labels(address)
        gauge.set(num)
        if not num and address not in self._workers:
            del self._num_running[address], self._gauges[address]
            metrics.router_endpoint_requests.remove(address)

    def num_requests(self, address: str) -> int:
        """How many requests this router has running on a worker."""
        return self._num_running[address]

    def suspect(self, address: str, epoch: str, reason: str) -> None:
        """Marks a worker as gone after a call to it failed: nothing is sent there until it reports again."""
        worker = self._workers.get(address)
        if worker is None or worker.info is None:
            return
        if worker.info.epoch == epoch and worker.state is WorkerState.READY:
            self._set_state(worker, WorkerState.UNREACHABLE, reason)

    # -------------------------------------------------------------------------------------- what is learnt

    async def _learn(self, worker: WorkerRecord, stub: worker_pb2_grpc.WorkerServiceAsyncStub) -> None:
        """Takes in what the worker said of itself."""
        self.track.forget_others({one.incarnation for one in self._workers.values()})
        async with self._adopting:  # if several workers answer at the same time, the first one decides
            await self._adopt(worker, stub)

    def _set_state(self, worker: WorkerRecord, state: WorkerState, problem: str) -> None:
        if (state, problem) == (worker.state, worker.problem):
            return
        extra = {"address": worker.address, "role": worker.role.value, "state": state.value}
        if state is not worker.state:
            excluded = self._excluded(worker)
            level = logging.INFO if state is WorkerState.READY and not excluded else logging.WARNING
            log.log(level, "worker %s", state.value, extra={**extra, "reason": excluded or problem})
            if worker.state is WorkerState.READY and state is WorkerState.UNREACHABLE:
                worker.lost_at = time.monotonic()
        worker.state, worker.problem = state, problem
        worker.changed()
        self._find_needed()
        self._measure_context()
        self._count_states()
        self._tell()

    def _role_changed(self, worker: WorkerRecord) -> None:
        """The worker takes work of another role, or says for the first time of which."""
        log.info("worker takes work of a role", extra={"address": worker.address, "role": worker.takes.value})
        self._find_needed()
        self._measure_context()
        self._count_states()
        self._tell()

    def _find_needed(self) -> None:
        """If no worker that takes requests is ready, those that could are used for them, until one is."""
        workers = self._workers.values()
        is_any_left = any(
            one.state is WorkerState.READY and one.takes is not WorkerRole.PREFILL and not self._excluded(one)
            for one in workers
        )
        for worker in workers:
            could = worker.role is WorkerRole.BOTH and worker.takes is WorkerRole.PREFILL
            is_needed = could and not is_any_left
            if worker.is_needed is not is_needed:
                worker.is_needed = is_needed
                worker.changed()
                what = "serves requests, as no other worker does" if is_needed else "serves prompts alone again"
                log.info(what, extra={"address": worker.address})

    def _measure_context(self) -> None:
        """Sets the model's `max_model_len` to the longest context of the ready decode workers."""
        model = self.model
        if model is None:
            return
        found = {
            e.max_model_len
            for e in self.endpoints()
            if e.can_decode and e.state is WorkerState.READY and not e.excluded and e.max_model_len is not None
        }
        if not found or max(found) == model.limits.max_model_len:
            return
        log.warning(
            "the context of the fleet changes", extra={"max_model_len": max(found), "workers_have": sorted(found)}
        )
        self._serve(replace(model, limits=replace(model.limits, max_model_len=max(found))))

    def _serve(self, model: ServedModel) -> None:
        self.models = {model.limits.model: model}
        self._changed.update(self._workers)  # each may fit the model or not

    def _tell(self) -> None:
        self._news.set()
        self._news.clear()

    def _count_states(self) -> None:
        for role in WorkerRole:
            for state in WorkerState:
                number = sum(w.takes is role and w.state is state for w in self._workers.values())
                metrics.router_endpoints.labels(role.value, state.value).set(number)

    # ------------------------------------------------------------------------------------- compatibility

    def _excluded(self, worker: WorkerRecord) -> str:
        return worker.excluded(self.model)

    async def _adopt(self, worker: WorkerRecord, stub: worker_pb2_grpc.WorkerServiceAsyncStub) -> None:
        """Makes this decode worker's model the one that is served, if none is served yet, or if no worker is left that
        has the model which was served."""
        info = worker.info
        if info is None or worker.role is WorkerRole.PREFILL:
            return
        if self.model is not None:
            excluded = self._excluded(worker)
            if not excluded:
                return
            log.warning("worker excluded", extra={"address": worker.address, "reason": excluded})
            others = (e for e in self.endpoints() if e.can_decode and not e.excluded)
            if any(e.state is not WorkerState.UNREACHABLE for e in others):
                return
        if role_of(info.role) not in (WorkerRole.DECODE, WorkerRole.BOTH):
            return
        self._serve(await ask_for_model(info, stub))
        self._measure_context()
        log.info("serving a model", extra={"model": info.model, "max_model_len": info.max_model_len})
        for other in self._workers.values():  # those that were ready before
            if reason := self._excluded(other):
                log.warning("worker excluded", extra={"address": other.address, "reason": reason})
        self._tell()


class _Sending:
    """See `Registry.sending`. A generator would cost each request more."""

    __slots__ = ("_num_context", "_registry", "_slack_s", "_tag", "_workers")

    def __init__(
        self,
        registry: Registry,
        workers: Sequence[tuple[WorkerRecord, int]],
        tag: int | None,
        slack_s: float | None,
        num_context: int,
    ) -> None:
        self._registry = registry
        self._workers = workers
        self._tag = tag
        self._slack_s = slack_s
        self._num_context = num_context

    def __enter__(self) -> None:
        now = time.monotonic()
        for worker, num_tokens in self._workers:
            worker.send(self, Sent(now, num_tokens, self._tag, self._slack_s, self._num_context))
            self._registry.count_requests(worker.address, 1)

    def __exit__(self, *_: object) -> None:
        for worker, _num_tokens in self._workers:
            worker.reported(self)
            worker.running.discard(self)
            self._registry.count_requests(worker.address, -1)
