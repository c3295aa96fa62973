"""`baton prefill`, `decode` and `worker`: one worker process, with the services of its role."""

from __future__ import annotations

import logging
import os
from functools import partial
from pathlib import Path

import uvloop

from common.config import WorkerSettings
from common.errors import StartupError
from common.logs import setup_logging
from common.process.allocator import keep_few_arenas
from common.process.garbage_collection import look_rarely
from common.types import WorkerRole
from decode_service import servicer as decode_servicer
from engine.hosts.place import host_index
from engine.loading.embedded_model import ensure_model
from prefill_service import servicer as prefill_servicer
from worker.engine_process import StartEngine, engine_environment
from worker.server import AddService, serve

log = logging.getLogger(__name__)

_SERVICES: dict[WorkerRole, list[AddService]] = {
    WorkerRole.PREFILL: [prefill_servicer.add_service],
    WorkerRole.DECODE: [decode_servicer.add_service],
    WorkerRole.BOTH: [prefill_servicer.add_service, decode_servicer.add_service],
}


def main(settings: WorkerSettings, role: WorkerRole, start_engine: StartEngine | None = None) -> int:
    """Serves until it is told to end; prints `ready grpc=ADDRESS role=ROLE` once it answers. `start_engine`: see
    `worker.server.serve`."""
    keep_few_arenas()
    setup_logging(role.value, level=settings.log_level, log_format=settings.log_format)
    if settings.connector == "memory":
        raise StartupError("connector: memory works inside one process only; workers need shared_storage or another")
    if role is WorkerRole.PREFILL:
        settings = settings.model_copy(update={"speculation": "none"})  # it generates nothing
    is_member = host_index(settings, os.environ) > 0
    model_dir = ensure_model(settings.model, settings.cache_dir, log.info)
    if is_member:
        os.environ.update(engine_environment(settings, os.environ))  # before torch is loaded
        from engine.hosts.member import run as run_member

        return run_member(settings, model_dir)
    ready = partial(_ready, role=role)
    return uvloop.run(serve(settings, role, model_dir, _served_name(settings), _SERVICES[role], ready, start_engine))


def _served_name(settings: WorkerSettings) -> str:
    """What clients call the model: as configured, else the directory's, file's or the embedded model's own name."""
    if settings.served_model_name:
        return settings.served_model_name
    path = Path(settings.model)
    if path.is_file():
        return path.stem
    return path.resolve().name if path.is_dir() else settings.model


def _ready(address: str, role: WorkerRole) -> None:
    look_rarely()
    print(f"ready grpc={address} role={role.value}", flush=True)  # noqa: T201 (for who started this process)
