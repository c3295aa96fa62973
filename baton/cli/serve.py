"""Commands that serve: a stack, or one process of it. What is slow to import is imported inside."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from baton.cli.options import SettingsCommand
from baton.settings import UP_SETTINGS, WORKER_SETTINGS, RouterCommandSettings
from common.config import DEFAULT_MODEL, AutoscalerSettings, RouterSettings, UpSettings, WorkerSettings
from common.logs import setup_logging
from common.model_files import broken_template
from common.process.garbage_collection import look_rarely
from common.process.unix_sockets import socket_path
from common.types import WorkerRole
from engine.loading.dtype import resolve_dtype
from engine.local.device_choice import SIMULATED, choose_device

if TYPE_CHECKING:
    from baton.stack.local_stack import Addresses

log = logging.getLogger(__name__)

S = TypeVar("S", bound=UpSettings)

HINTS = """
Try it from another terminal (Ctrl-C here ends the stack):

  curl {http}/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{{"messages": [{{"role": "user", "content": "What is the capital of Japan?"}}], "temperature": 0}}'

  grpcurl -plaintext -d '{{"messages": [{{"role": "user", "content": "Hello!"}}]}}' \\
    {grpc} baton.v1.InferenceService/Chat

  python -c 'import openai; client = openai.OpenAI(base_url="{http}/v1", api_key="none"); print(
    client.chat.completions.create(model=client.models.list().data[0].id,
      messages=[{{"role": "user", "content": "Hello!"}}]).choices[0].message.content)'

  baton chat --router {grpc}
"""


def up(settings: UpSettings) -> int:
    from baton.stack import local_stack as stack
    from baton.stack import stack_plan
    from baton.stack.kv_directory import kv_directory

    setup_logging("up", level=settings.log_level, log_format=settings.log_format)
    stack_plan.check(settings)
    settings = prepare_model(settings)
    with kv_directory(stack_plan.given_kv_dir(settings)) as kv_dir:
        running = stack_plan.plan(settings, kv_dir)
        if sys.stderr.isatty():
            running.progress = show_progress
        return stack.run(running, on_ready=partial(print_ready, hints=settings.hints))


def show_progress(num_ready: int, num_processes: int) -> None:
    """In one line of a terminal, which the next one is written over."""
    what = f"{num_ready} of {num_processes} processes are ready"
    if num_ready == num_processes:
        what = "waiting for the router to find all workers"
    sys.stderr.write(f"\x1b[K{what}\r")
    sys.stderr.flush()


def prepare_model(settings: S) -> S:
    """What is decided once, before several workers do so: makes sure that the model is on disk (progress to standard
    error), and chooses device and dtype, which all workers need alike."""
    from engine.loading.embedded_model import ensure_model

    path = ensure_model(settings.model, settings.cache_dir, lambda line: print(line, file=sys.stderr, flush=True))
    if reason := broken_template(path):
        log.warning("chats will be refused, completions will not", extra={"reason": reason})
    device = choose_device(settings.device)
    log.info("device of all workers", extra={"device": device.device, "reason": device.reason})
    if device.device == SIMULATED:  # no weights are read, so they may be an empty file
        return settings
    dtype = resolve_dtype(settings.dtype, path, device.device, settings.kernels)
    log.info("dtype of all workers", extra={"dtype": dtype.dtype, "reason": dtype.reason})
    return settings.model_copy(update={"device": device.device, "dtype": dtype.dtype})


def print_ready(addresses: Addresses, *, hints: bool) -> None:
    if sys.stderr.isatty():
        sys.stderr.write("\x1b[K")
    print(f"ready http={addresses.http} grpc={addresses.grpc}", flush=True)
    if hints:
        print(_hints(addresses), file=sys.stderr, flush=True)


def _hints(addresses: Addresses) -> str:
    path = socket_path(addresses.http)
    if path is None:
        return HINTS.format(http=addresses.http, grpc=addresses.grpc)
    parts = [part for part in HINTS.split("\n\n") if "openai" not in part]  # which knows no such sockets
    return "\n\n".join(parts).format(http=f"--unix-socket {path} http://localhost", grpc=addresses.grpc)


def worker(settings: WorkerSettings, *, role: WorkerRole) -> int:
    from baton.stack.worker_process import main

    return main(settings, role)


def router(settings: RouterSettings, *, file: tuple[str, Callable[[], RouterSettings]] | None) -> int:
    from router.reload import SettingsFile
    from router.run import run

    setup_logging("router", level=settings.log_level, log_format=settings.log_format)

    def ready(http: str, grpc: str) -> None:
        look_rarely()
        print(f"ready http={http} grpc={grpc}", flush=True)

    run(settings, ready, None if file is None else SettingsFile(*file))
    return 0


def autoscaler(settings: AutoscalerSettings) -> int:
    from router.autoscaler.server import main

    return main(settings)


SERVE_COMMANDS = (
    SettingsCommand(
        "up",
        UP_SETTINGS,
        up,
        about="Runs a whole stack on this machine: router, prefill and decode workers.",
        examples=[
            "baton up",
            "baton up --model ./Llama-3.2-1B-Instruct --prefill 2 --decode 2",
            "baton up --prefill 0 --decode 0 --both 1 --http-port 0 --grpc-port 0",
        ],
    ),
    SettingsCommand(
        "prefill",
        WORKER_SETTINGS,
        partial(worker, role=WorkerRole.PREFILL),
        about="Runs one prefill worker.",
        examples=[f"baton prefill --listen 127.0.0.1:50061 --model {DEFAULT_MODEL} --kv-dir /tmp/kv"],
    ),
    SettingsCommand(
        "decode",
        WORKER_SETTINGS,
        partial(worker, role=WorkerRole.DECODE),
        about="Runs one decode worker.",
        examples=[f"baton decode --listen 127.0.0.1:50062 --model {DEFAULT_MODEL} --kv-dir /tmp/kv"],
    ),
    SettingsCommand(
        "worker",
        WORKER_SETTINGS,
        partial(worker, role=WorkerRole.BOTH),
        about="Runs one worker with both roles.",
        examples=[f"baton worker --listen 127.0.0.1:50063 --model {DEFAULT_MODEL} --kv-dir /tmp/kv"],
    ),
    SettingsCommand(
        "router",
        RouterCommandSettings,
        router,
        rereads=True,
        about="Runs a router in front of workers.",
        examples=[
            "baton router --prefill 127.0.0.1:50061 --decode 127.0.0.1:50062",
            "baton router --decode 10.0.0.1:50061,10.0.0.2:50061 --http-listen 0.0.0.0:8000",
        ],
    ),
    SettingsCommand(
        "autoscaler",
        AutoscalerSettings,
        autoscaler,
        about="Watches the fleet and says how many workers each role needs.",
        examples=[
            "baton autoscaler --prefill 127.0.0.1:50061 --decode 127.0.0.1:50062 --routers 127.0.0.1:50051",
            "baton autoscaler --prefill k8s:///prod/baton-prefill:grpc --decode k8s:///prod/baton-decode:grpc \\",
            "  --external-metrics-listen 0.0.0.0:6443 --external-metrics-service prod/baton-autoscaler",
        ],
    ),
)
