"""The life of a worker process: bind, start the engine, serve, drain, end."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import REGISTRY, CollectorRegistry

from common import metric_aliases
from common.config import WorkerSettings
from common.errors import StartupError
from common.grpc.health import SERVING, Health
from common.grpc.reflection import ReflectionPool
from common.grpc.server import make_server, until_ended
from common.grpc.transport import add_port, health_server
from common.metric_aliases import CacheFacts
from common.metric_page import ChangedRegistry
from common.process.tasks import VitalTasks, count_tasks
from common.tls import serving_files
from common.trace_settings import make_trace_export
from common.types import WorkerRole, WorkerState
from worker.drain import drain
from worker.embed_service import add_service as add_embed_service
from worker.engine_process import StartEngine
from worker.metrics_port import serve_metrics
from worker.port import server_limits
from worker.receiving import ReceivingInterceptor
from worker.shell import Worker
from worker.worker_service import add_service as add_worker_service

log = logging.getLogger(__name__)

AddService = Callable[[Worker, grpc.aio.Server], str]
"""Adds a servicer to the server; returns the service's full name."""

HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
CLOSE_GRACE_S = 1.0  # for streams that outlived the drain to tell their callers


async def serve(
    settings: WorkerSettings,
    role: WorkerRole,
    model_dir: Path,
    model_name: str,
    services: list[AddService],
    on_ready: Callable[[str], None],
    start_engine: StartEngine | None = None,
) -> int:
    """Serves until SIGTERM, SIGINT, a Drain call or the end of the engine or a gRPC server; the process's exit code.

    0 if every stream ended by itself or was handed over, 1 if the drain timeout cut one or what it stands on ended.
    `on_ready` gets the address by which others reach this worker. `start_engine` starts the engine's process; without
    it, that is a process of its own. Raises `StartupError` in one line.
    """
    worker = Worker(settings, role, model_dir, model_name, start_engine)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # until there are lines to show it ends nothing
    await worker.engine.spawn()
    traces = worker.spans = make_trace_export(settings, f"baton-{role.value}", worker.worker_id)
    options, max_calls = server_limits(settings, model_dir)
    server = make_server(options, [ReceivingInterceptor()], max_calls)
    probed: grpc.aio.Server | None = None
    vital = VitalTasks(lambda _: worker.drain_requested.set())
    try:
        worker.address = _bind(server, settings)
        if settings.metrics_port is not None:
            serve_metrics(settings.listen.rpartition(":")[0], settings.metrics_port, _shown(worker))
        health = Health()
        probed = _bind_health(settings, health)
        names = [add(worker, server) for add in [*services, add_embed_service, add_worker_service]]
        health_pb2_grpc.add_HealthServicer_to_server(health, server)
        reflected = [*names, HEALTH, reflection.SERVICE_NAME]
        reflection.enable_server_reflection(reflected, server, pool=ReflectionPool())
        await worker.wait_ready()
        await server.start()
        vital.start(until_ended(server), name="grpc")
        vital.start(count_tasks(), name="count of tasks")
        if probed is not None:
            await probed.start()
            vital.start(until_ended(probed), name="health probes")
        for name in ("", *names):
            health.set(name, SERVING)
        _drain_on_signals(worker)
        worker.roles.begin()
        log.info("serving", extra={"address": worker.address, "epoch": worker.epoch, "fingerprint": worker.fingerprint})
        on_ready(worker.address)
        num_cut = 0
        if not await _wait_for_end(worker):
            worker.state = WorkerState.DRAINING
            worker.roles.close()  # the drain offers all that is left
            health.end()
            await worker.engine.notify_load()
            num_cut = await drain(worker)
        return 1 if num_cut or worker.engine.died.is_set() or vital.failure is not None else 0
    finally:
        vital.cancel()
        worker.roles.close()
        await server.stop(CLOSE_GRACE_S)
        if probed is not None:
            await probed.stop(None)
        await worker.wait_finished()
        await worker.channels.close()
        await worker.engine.stop()
        if traces is not None:
            await asyncio.to_thread(traces.close)


def _shown(worker: Worker) -> CollectorRegistry:
    """What `/metrics` has."""
    if worker.settings.metrics_aliases == "none":
        return REGISTRY

    def facts() -> CacheFacts:
        load = worker.engine.load
        return CacheFacts(
            model=worker.model_name,
            block_size=worker.settings.block_size,
            num_blocks=load.num_blocks,
            num_used_blocks=load.num_blocks - load.num_free_blocks - load.num_cached_blocks,
        )

    return ChangedRegistry(lambda families: metric_aliases.with_aliases(families, metric_aliases.WORKER, facts))


def _bind(server: grpc.aio.Server, settings: WorkerSettings) -> str:
    """Binds before the model is loaded, so that a taken port is known at once; the advertised address."""
    host, _, _ = settings.listen.rpartition(":")
    tls = serving_files(settings, settings.tls_ca)
    try:
        port = add_port(server, settings.listen, tls)
    except RuntimeError as error:
        raise StartupError(f"listen: cannot bind {settings.listen}: is the port taken?") from error
    if port == 0:
        raise StartupError(f"listen: cannot bind {settings.listen}")
    return settings.advertise or f"{host}:{port}"


def _bind_health(settings: WorkerSettings, health: Health) -> grpc.aio.Server | None:
    if settings.health_listen is None:
        return None
    try:
        server = health_server(settings.health_listen, [ReceivingInterceptor()])
    except RuntimeError as error:
        raise StartupError(f"health_listen: cannot bind {settings.health_listen}: is the port taken?") from error
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    return server


def _drain_on_signals(worker: Worker) -> None:
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, worker.drain_requested.set)
    loop.add_signal_handler(signal.SIGUSR1, worker.flip_debug)


async def _wait_for_end(worker: Worker) -> bool:
    """Waits for a drain request or the engine's death; True if it died."""
    ends = [asyncio.create_task(worker.drain_requested.wait()), asyncio.create_task(worker.engine.died.wait())]
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    for task in ends:
        task.cancel()
    return worker.engine.died.is_set()
