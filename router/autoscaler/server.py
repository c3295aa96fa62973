"""The autoscaler's process: reads the fleet, decides once a second, and tells whoever scales by it.

workers, routers ──> FleetLoad ──signals──> Planner ──decisions──> Board ──> /metrics, external metrics, KEDA
                                                                 └─────> Actuator (leader only) ──> cluster
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence

from common.config import AutoscalerSettings
from common.errors import ConfigError
from common.grpc.transport import Channels
from common.logs import flip_debug, setup_logging
from common.process.tasks import VitalTasks
from common.tls import serving_files
from common.types import WorkerRole
from router.autoscaler import http
from router.autoscaler.actuator import Actuator
from router.autoscaler.aggregated import AggregatedApi
from router.autoscaler.board import Board, ShiftMade
from router.autoscaler.fleet_load import FleetLoad
from router.autoscaler.keda_server import KedaServer
from router.autoscaler.kubernetes import Cluster, Workload
from router.autoscaler.leader import Elector
from router.autoscaler.model_rules import LatencyGoal, ModelRules, latency_goal
from router.autoscaler.planner import Bounds, Planner, PlannerOptions
from router.autoscaler.role_orders import RoleOrders
from router.autoscaler.roles import RoleOptions, RolePlanner
from router.autoscaler.rules import TargetRules, Targets
from router.autoscaler.signals import ROLES, FleetSignals, MovableWorker, ScaleDecision
from router.fleet.discovery.kubernetes import ApiServer, KubernetesError, own_namespace
from router.fleet.discovery.sources import discover
from router.stop_signals import level_signal, stop_signals

log = logging.getLogger(__name__)

TICK_S = 1.0

Ready = Callable[[dict[str, str]], None]
"""Called once everything listens, with the addresses: `http`, `external_metrics`, `keda`."""


def check(settings: AutoscalerSettings) -> None:
    """What one setting alone cannot say. Raises `ConfigError`."""
    for role in WorkerRole:
        fewest, most = getattr(settings, f"{role.value}_min"), getattr(settings, f"{role.value}_max")
        if fewest > most:
            raise ConfigError(f"{role.value}_min", f"{fewest} is more than {role.value}_max, {most}")
    workloads_of(settings)
    if settings.both_workload is not None and not settings.move_roles:
        raise ConfigError("both_workload", "means nothing without --move-roles")
    if _goal(settings) is not None and not settings.routers:
        raise ConfigError("routers", f"are needed by --planner {settings.planner}: what arrives is read there")
    if (settings.external_metrics_cert is None) != (settings.external_metrics_key is None):
        raise ConfigError("external_metrics_key", "goes with --external-metrics-cert: give both or none")
    if settings.external_metrics_listen and settings.external_metrics_cert is None:
        _, slash, name = (settings.external_metrics_service or "").partition("/")
        if not slash or not name:
            reason = "NAMESPACE/NAME is needed if no --external-metrics-cert is given"
            raise ConfigError("external_metrics_service", reason)


def make_planner(settings: AutoscalerSettings) -> tuple[Planner, Planner | None, Targets]:
    """The one that decides, and one that only advises if that is asked for."""
    targets = Targets(
        queued_tokens=settings.target_queued_tokens,
        prefill_rate=settings.target_prefill_rate,
        kv_usage=settings.target_kv_usage,
        requests=settings.target_requests,
    )
    options = PlannerOptions(
        prefill=Bounds(settings.prefill_min, settings.prefill_max),
        decode=Bounds(settings.decode_min, settings.decode_max),
        both=Bounds(settings.both_min, settings.both_max) if settings.move_roles else None,
        tolerance=settings.tolerance,
        scale_up_delay_s=settings.scale_up_delay,
        scale_down_delay_s=settings.scale_down_delay,
        idle_timeout_s=settings.idle_timeout,
    )
    goal = _goal(settings)
    by_model = Planner(options, ModelRules(goal, TargetRules(targets))) if goal else None
    if settings.planner == "model" and by_model is not None:
        return by_model, None, targets
    return Planner(options, TargetRules(targets)), by_model, targets


def _goal(settings: AutoscalerSettings) -> LatencyGoal | None:
    """None if signals alone decide. Raises `ConfigError`."""
    return latency_goal(
        settings.planner,
        settings.target_ttft_ms,
        settings.target_tpot_ms,
        share=settings.target_share,
        startup_s=settings.startup_time,
        kv_usage=settings.target_kv_usage,
    )


async def serve(settings: AutoscalerSettings, ready: Ready | None = None, stop: asyncio.Event | None = None) -> None:
    """Runs until SIGTERM, SIGINT or `stop`. Raises `StartupError` or `ConfigError` with one line."""
    stop = stop or asyncio.Event()
    check(settings)
    planner, adviser, targets = make_planner(settings)
    board = Board()
    vital, channels = VitalTasks(), Channels(settings)
    fleet = FleetLoad(
        discover(settings.prefill, key="prefill"),
        discover(settings.decode, key="decode"),
        discover(settings.routers, key="routers"),
        arrival_window_s=settings.arrival_window,
        channels=channels,
        vital=vital,
    )
    addresses: dict[str, str] = {}
    async with contextlib.AsyncExitStack() as stack:
        jobs: dict[str, Coroutine[None, None, None]] = {}
        cluster = await _cluster(settings, stack)
        plain = http.Server(settings.http_listen, http.StatusPage(board))
        stack.push_async_callback(plain.close)
        addresses["http"] = f"http://{plain.address}"
        if settings.external_metrics_listen:
            api = AggregatedApi(settings, board, cluster)
            stack.push_async_callback(api.close)
            addresses["external_metrics"] = api.address
            jobs["external metrics"] = api.run()
        if settings.keda_listen:
            keda = KedaServer(settings.keda_listen, board, targets, serving_files(settings, settings.tls_ca))
            stack.push_async_callback(keda.close)
            addresses["keda"] = keda.address
            jobs["keda"] = keda.run()
        elector = None
        if settings.leader_elect and cluster is not None:
            identity = f"{os.environ.get('HOSTNAME') or socket.gethostname()}-{secrets.token_hex(4)}"
            elector = Elector(cluster, settings.lease_name, identity)
            jobs["leader election"] = elector.run()
        actuator = None
        if cluster is not None and (settings.apply or settings.deletion_costs):
            actuator = Actuator(cluster, workloads_of(settings), fleet.pods if settings.deletion_costs else None)
        roles = _Roles(settings, channels) if settings.move_roles else None
        jobs["decisions"] = _decide(
            fleet, planner, adviser, roles, board, actuator, lambda: elector is None or elector.leads
        )
        jobs["status page"] = plain.run()

        stack.push_async_callback(fleet.close)
        fleet.start()
        with stop_signals(stop), level_signal(flip_debug):
            await _run(jobs, vital, stop, lambda: ready(addresses) if ready else None)
    log.info("autoscaler ended")


async def _cluster(settings: AutoscalerSettings, stack: contextlib.AsyncExitStack) -> Cluster | None:
    """None if nothing that was asked for needs one."""
    aggregated = settings.external_metrics_listen and not (settings.external_metrics_cert and settings.front_proxy_ca)
    if not (aggregated or settings.leader_elect or settings.apply or settings.deletion_costs):
        return None
    api = await ApiServer.connect()
    stack.push_async_callback(api.close)
    return Cluster(api, namespace_of(settings))


def namespace_of(settings: AutoscalerSettings) -> str:
    if settings.namespace:
        return settings.namespace
    if settings.external_metrics_service:
        return settings.external_metrics_service.partition("/")[0]
    return own_namespace()


def workloads_of(settings: AutoscalerSettings) -> dict[WorkerRole, Workload]:
    """What `--apply` scales; empty without it. Raises `ConfigError`."""
    if not settings.apply:
        return {}
    roles = (WorkerRole.BOTH,) if settings.move_roles else ROLES
    keys = {role: f"{role.value}_workload" for role in roles}
    return {role: Workload.parse(getattr(settings, key) or "", key) for role, key in keys.items()}


class _Roles:
    """What becomes of roles, if they move. Orders are carried out beside, so that a slow worker makes no value old."""

    def __init__(self, settings: AutoscalerSettings, channels: Channels) -> None:
        self._planner = RolePlanner(
            RoleOptions(interval_s=settings.role_interval, delay_s=settings.role_delay, gain=settings.role_gain)
        )
        self._orders = RoleOrders(channels)
        self._carrying_out: asyncio.Task[None] | None = None
        self._led = False

    def made(self) -> Sequence[ShiftMade]:
        return self._orders.made()

    def step(
        self,
        decisions: Mapping[WorkerRole, ScaleDecision],
        signals: FleetSignals,
        movable: Sequence[MovableWorker],
        *,
        leads: bool,
    ) -> None:
        if self._carrying_out is not None and self._carrying_out.done():
            self._carrying_out.result()
            self._carrying_out = None
        if leads and not self._led:
            self._planner.adopt(time.monotonic())
        self._led = leads
        if not leads or self._carrying_out is not None:
            return
        if shift := self._planner.step(time.monotonic(), decisions, signals, movable):
            self._carrying_out = asyncio.create_task(self._orders.carry_out(shift))

    async def close(self) -> None:
        if self._carrying_out is not None:
            self._carrying_out.cancel()
            await asyncio.wait([self._carrying_out])


async def _decide(
    fleet: FleetLoad,
    planner: Planner,
    adviser: Planner | None,
    roles: _Roles | None,
    board: Board,
    actuator: Actuator | None,
    leads: Callable[[], bool],
) -> None:
    """Decides every TICK_S; the actuator works beside, so that a slow cluster makes no value old."""
    acting: asyncio.Task[None] | None = None
    led = False
    try:
        while True:
            signals = fleet.signals()
            if signals is not None:
                decisions = planner.step(time.monotonic(), signals)
                advice = adviser.step(time.monotonic(), signals) if adviser is not None else {}
                _log("decided", decisions)
                _log("advised", advice)
                if roles is None:
                    board.put(signals, decisions, advice)
                else:
                    movable = fleet.movable()
                    roles.step(decisions, signals, movable, leads=leads())
                    board.put(signals, decisions, advice, movable, roles.made())
                    decisions = {WorkerRole.BOTH: decisions[WorkerRole.BOTH]}  # what pods are scaled by
                if actuator is not None and (acting is None or acting.done()):
                    if acting is not None:
                        acting.result()
                    acting = None
                    if not leads():
                        if led:
                            actuator.step_down()
                        led = False
                    elif not led:
                        led = await _adopt(planner, actuator)  # a leader begins by leaving things as they are
                    else:
                        numbers = {role: signals.of(role).num_workers for role in decisions}
                        acting = asyncio.create_task(actuator.act(decisions, numbers))
            await asyncio.sleep(TICK_S)
    finally:
        if roles is not None:
            await roles.close()
        if acting is not None:
            acting.cancel()
            await asyncio.wait([acting])


def _log(what: str, decisions: Mapping[WorkerRole, ScaleDecision]) -> None:
    for role, decision in decisions.items():
        if decision.desired != decision.previous:
            log.info(
                what,
                extra={
                    "role": role.value,
                    "replicas": f"{decision.previous} -> {decision.desired}",
                    "reason": "; ".join(decision.reasons),
                },
            )


async def _adopt(planner: Planner, actuator: Actuator) -> bool:
    """Takes what the cluster has for what was desired. False if it did not say: the next second asks again."""
    try:
        async with asyncio.timeout(TICK_S / 2):
            current = await actuator.current()
    except (KubernetesError, TimeoutError) as error:
        log.warning("replicas could not be read", extra={"reason": str(error) or "no answer"})
        return False
    for role, replicas in current.items():
        planner.adopt(time.monotonic(), role, replicas)
    return True


async def _run(
    jobs: dict[str, Coroutine[None, None, None]], vital: VitalTasks, stop: asyncio.Event, started: Callable[[], None]
) -> None:
    """All of them until `stop`, or until a vital task ends."""
    for name, job in jobs.items():
        vital.start(job, name=name)
    started()
    try:
        await vital.failed_or(stop)
    finally:
        await vital.close()
    vital.raise_failure()


def main(settings: AutoscalerSettings) -> int:
    """The `baton autoscaler` process: prints `ready http=URL ...` once it listens."""
    setup_logging("autoscaler", level=settings.log_level, log_format=settings.log_format)

    def print_ready(addresses: dict[str, str]) -> None:
        print("ready", *(f"{key}={value}" for key, value in addresses.items()), flush=True)  # noqa: T201

    asyncio.run(serve(settings, print_ready))
    return 0
