"""What a router needs to store responses, put together."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
from pathlib import Path

from common.config import RouterSettings
from common.errors import StartupError
from common.logs import RareLine
from router.api.rest.openai.stored_responses import StoredResponses
from router.responses.store import ResponseStore
from router.serving.gateway import Gateway

log = logging.getLogger(__name__)

CLEAN_S = 600.0


async def make_responses(
    settings: RouterSettings, gateway: Gateway, stack: contextlib.AsyncExitStack
) -> StoredResponses | None:
    """None if the settings ask for none. `stack` closes their file. Raises `StartupError`."""
    if settings.response_file is None:
        return None
    try:
        store = await asyncio.to_thread(
            ResponseStore,
            Path(settings.response_file),
            keep_s=3600 * settings.response_keep_hours,
            max_bytes=int(settings.response_max_mb * 2**20),
            max_owner_bytes=int(settings.response_max_tenant_mb * 2**20),
        )
    except (OSError, sqlite3.Error) as error:
        raise StartupError(f"response_file: cannot use {settings.response_file}: {error}") from error
    stored = StoredResponses(store, gateway.admission.max_request_bytes)
    stack.push_async_callback(stored.close)
    cleaning = asyncio.create_task(_clean(store))
    stack.callback(cleaning.cancel)
    return stored


async def _clean(store: ResponseStore) -> None:
    """Forgets what is too old, until cancelled. Until then its age hides it."""
    failed = RareLine(log, "the file of responses cannot be cleaned", level=logging.ERROR)
    while True:
        try:
            if num := await asyncio.to_thread(store.clean):
                log.info("old responses are gone", extra={"number": num})
        except sqlite3.Error as error:
            failed.happened({"reason": str(error)})
        await asyncio.sleep(CLEAN_S)
