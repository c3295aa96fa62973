"""The life of a worker process: bind, start the engine, serve, drain, end."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable
from pathlib import Path

import grpc
import prometheus_client
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from common.config import WorkerSettings
from common.errors import StartupError
from common.grpc_health import SERVING, Health
from common.grpc_server import make_server
from common.grpc_transport import add_port, health_server
from common.reflection import ReflectionPool
from common.tls import serving_files
from common.types import WorkerRole, WorkerState
from worker.drain import drain
from worker.embed_service import add_service as add_embed_service
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
) -> int:
    """Serves until SIGTERM, SIGINT, a Drain call or the engine's death; the process's exit code.

    0 if every stream ended by itself or was handed over, 1 if the drain timeout cut one or the engine died.
    `on_ready` gets the address by which others reach this worker. Raises `StartupError` in one line.
    """
    worker = Worker(settings, role, model_dir, model_name)
    await worker.engine.spawn()
    options, max_calls = server_limits(settings, model_dir)
    server = make_server(options, [ReceivingInterceptor()], max_calls)
    probed: grpc.aio.Server | None = None
    try:
        worker.address = _bind(server, settings)
        _serve_metrics(settings)
        health = Health()
        probed = _bind_health(settings, health)
        names = [add(worker, server) for add in [*services, add_embed_service, add_worker_service]]
        health_pb2_grpc.add_HealthServicer_to_server(health, server)
        reflected = [*names, HEALTH, reflection.SERVICE_NAME]
        reflection.enable_server_reflection(reflected, server, pool=ReflectionPool())
        await worker.wait_ready()
        await server.start()
        if probed is not None:
            await probed.start()
        for name in ("", *names):
            health.set(name, SERVING)
        _drain_on_signals(worker)
        log.info("serving", extra={"address": worker.address, "epoch": worker.epoch, "fingerprint": worker.fingerprint})
        on_ready(worker.address)
        num_cut = 0
        if not await _wait_for_end(worker):
            worker.state = WorkerState.DRAINING
            health.end()
            await worker.engine.notify_load()
            num_cut = await drain(worker)
        return 1 if num_cut or worker.engine.died.is_set() else 0
    finally:
        await server.stop(CLOSE_GRACE_S)
        if probed is not None:
            await probed.stop(None)
        await worker.wait_finished()
        await worker.channels.close()
        await worker.engine.stop()


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


def _serve_metrics(settings: WorkerSettings) -> None:
    """Prometheus' /metrics over HTTP, on the host of --listen, in a thread of its own."""
    if settings.metrics_port is None:
        return
    host = settings.listen.rpartition(":")[0].strip("[]")
    try:
        http_server, _ = prometheus_client.start_http_server(settings.metrics_port, addr=host or "0.0.0.0")
    except OSError as error:
        raise StartupError(f"metrics_port: cannot bind {settings.metrics_port}: {error.strerror}") from error
    log.info("metrics", extra={"url": f"http://{host}:{http_server.server_port}/metrics"})


def _drain_on_signals(worker: Worker) -> None:
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, worker.drain_requested.set)


async def _wait_for_end(worker: Worker) -> bool:
    """Waits for a drain request or the engine's death; True if it died."""
    ends = [asyncio.create_task(worker.drain_requested.wait()), asyncio.create_task(worker.engine.died.wait())]
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    for task in ends:
        task.cancel()
    return worker.engine.died.is_set()
