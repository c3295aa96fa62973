"""What a router needs for batches of requests, put together."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from dataclasses import dataclass
from pathlib import Path

from common.config import RouterSettings
from common.errors import StartupError
from router.api.rest.openai.batches import BatchHandlers, LineAnswers
from router.api.rest.openai.files import FileHandlers
from router.batches.lines import MAX_LINE_HEAD_BYTES
from router.batches.runner import BatchRunner
from router.batches.store import BatchStore
from router.running.room import Room
from router.serving.gateway import Gateway

QUIET_S = 0.5  # without other requests, before a batch goes on: one that follows at once finds the workers free


@dataclass(slots=True, frozen=True)
class Batches:
    runner: BatchRunner
    answers: LineAnswers
    handlers: tuple[FileHandlers, BatchHandlers]


async def make_batches(settings: RouterSettings, gateway: Gateway, stack: contextlib.AsyncExitStack) -> Batches | None:
    """None if the settings ask for none. `stack` closes their file. Raises `StartupError`."""
    if settings.batch_file is None:
        return None
    try:
        store = await asyncio.to_thread(BatchStore, Path(settings.batch_file))
    except (OSError, sqlite3.Error) as error:
        raise StartupError(f"batch_file: cannot use {settings.batch_file}: {error}") from error
    stack.push_async_callback(asyncio.to_thread, store.close)
    admission = gateway.admission
    demand, most = admission.demand, settings.batch_requests
    room = Room(lambda: demand.num_of_clients, most=most, share=settings.batch_share, quiet_s=QUIET_S)
    demand.changed = room.look
    answers = LineAnswers(room)

    def max_line_bytes() -> int | None:
        is_known = settings.max_request_mb is not None or admission.registry.model is not None
        return admission.max_request_bytes() + MAX_LINE_HEAD_BYTES if is_known else None

    runner = BatchRunner(
        store,
        answers,
        at_a_time=settings.batch_requests,
        max_line_bytes=max_line_bytes,
        priority=settings.batch_priority,
        keep_s=86_400 * settings.batch_keep_days,
    )
    files = FileHandlers(
        store,
        max_bytes=int(settings.batch_max_file_mb * 2**20),
        max_stored_bytes=int(settings.batch_max_stored_mb * 2**20),
        receive_timeout_s=settings.receive_timeout,
    )
    return Batches(runner, answers, (files, BatchHandlers(store, runner, admission)))
