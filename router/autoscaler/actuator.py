"""What the leader does to the cluster: deletion costs, then replicas."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from common import metrics
from common.types import WorkerRole
from router.autoscaler.fleet_load import PodLoad
from router.autoscaler.kubernetes import Workload
from router.autoscaler.signals import ScaleDecision
from router.fleet.discovery.kubernetes import KubernetesError

log = logging.getLogger(__name__)

SYNC_S = 30.0  # replicas that somebody else changed are set again after this long
COSTS_EVERY_S = 10.0  # if nothing is about to go
COSTS_BEFORE_SCALE_DOWN_S = 2.0
STREAM_COST = 100
MAX_CACHE_COST = STREAM_COST - 1


class Replicas(Protocol):
    """The part of a cluster that is written here; see `kubernetes.Cluster`."""

    async def replicas(self, workload: Workload) -> int: ...

    async def scale(self, workload: Workload, replicas: int) -> None: ...

    async def set_deletion_cost(self, pod: str, cost: int) -> bool: ...


def deletion_cost(pod: PodLoad) -> int:
    """Streams first, in powers of two; among idle pods the one with less in its cache goes first, likewise.

    Each step is twice the one before, so the pods of a busy fleet are not patched all the time. Pods within one step
    count as equal: the order need not be finer.
    """
    return pod.num_streams.bit_length() * STREAM_COST + min(pod.num_cached_blocks.bit_length(), MAX_CACHE_COST)


class Actuator:
    """Call `act` with each new decision while this process leads, `step_down` when it does not."""

    def __init__(
        self,
        cluster: Replicas,
        workloads: Mapping[WorkerRole, Workload],
        pods: Callable[[WorkerRole], list[PodLoad]] | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`workloads` empty: replicas are somebody else's business. `pods` None: so are deletion costs."""
        self._cluster = cluster
        self._workloads = workloads
        self._pods = pods
        self._clock = clock
        self._replicas: dict[WorkerRole, tuple[int, float]] = {}  # as last seen or set, and when it was seen
        self._costs: dict[str, int] = {}
        self._costs_at: dict[WorkerRole, float] = {}

    def step_down(self) -> None:
        """Another leader may change what we know."""
        self._replicas.clear()
        self._costs.clear()
        self._costs_at.clear()

    async def current(self) -> dict[WorkerRole, int]:
        """Replicas that the workloads are told to have. Raises `KubernetesError`."""
        return {role: await self._cluster.replicas(workload) for role, workload in self._workloads.items()}

    async def act(self, decisions: Mapping[WorkerRole, ScaleDecision], num_workers: Mapping[WorkerRole, int]) -> None:
        """Failures are logged and counted; the next call tries again."""
        for role, decision in decisions.items():
            try:
                await self._rank(role, shrinking=decision.desired < num_workers[role])
                await self._scale(role, decision)
            except KubernetesError as error:
                metrics.autoscaler_failures.labels("act").inc()
                log.warning("the cluster could not be changed", extra={"role": role.value, "reason": str(error)})

    async def _scale(self, role: WorkerRole, decision: ScaleDecision) -> None:
        workload = self._workloads.get(role)
        if workload is None:
            return
        now = self._clock()
        known = self._replicas.get(role)
        if known is None or now - known[1] > SYNC_S:
            known = self._replicas[role] = (await self._cluster.replicas(workload), now)
        before = known[0]
        if before == decision.desired:
            return
        await self._cluster.scale(workload, decision.desired)
        self._replicas[role] = (decision.desired, now)
        metrics.autoscaler_scalings.labels(role.value, "up" if decision.desired > before else "down").inc()
        log.info(
            "scaled",
            extra={
                "role": role.value,
                "workload": f"{workload.kind}/{workload.name}",
                "replicas": f"{before} -> {decision.desired}",
                "reason": "; ".join(decision.reasons),
            },
        )

    async def _rank(self, role: WorkerRole, *, shrinking: bool) -> None:
        """Patches pods whose cost has changed. Before replicas go down it is done at once."""
        if self._pods is None:
            return
        now = self._clock()
        interval = COSTS_BEFORE_SCALE_DOWN_S if shrinking else COSTS_EVERY_S
        last = self._costs_at.get(role)
        if last is not None and now - last < interval:
            return
        pods = self._pods(role)
        for pod in pods:
            cost = deletion_cost(pod)
            if self._costs.get(pod.pod) == cost:
                continue
            if await self._cluster.set_deletion_cost(pod.pod, cost):
                self._costs[pod.pod] = cost
        self._costs_at[role] = now
