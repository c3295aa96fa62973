"""`/v1/batches`: many requests in a file, answered when there is room for them."""

from __future__ import annotations

import asyncio
import time

from fastapi import Request
from fastapi.responses import Response
from starlette.types import ASGIApp

from common.errors import InvalidArgumentError, OverloadedError
from router.api.api_keys import caller, current_client
from router.api.rest.http.errors import json_response
from router.api.rest.in_process import post
from router.api.rest.openai.body_types import Body
from router.api.rest.openai.files import page
from router.api.rest.openai.parsing import read
from router.batches.lines import EMBEDDINGS
from router.batches.records import Batch, BatchLine, LineAnswer
from router.batches.runner import BatchRunner, new_batch_id
from router.batches.store import BatchStore
from router.limits.admission import Admission
from router.running.room import Room

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
MAX_WINDOW_H = 24 * 7
MAX_METADATA = 16
MAX_UNFINISHED = 100  # batches of one owner


class BatchBody(Body, kw_only=True):
    input_file_id: str
    endpoint: str
    completion_window: str  # "24h"; any number of hours up to a week
    metadata: dict[str, str] | None = None


class BatchHandlers:
    def __init__(self, store: BatchStore, runner: BatchRunner, admission: Admission) -> None:
        self._store = store
        self._runner = runner
        self._admission = admission

    async def create(self, request: Request) -> Response:
        body = await read(BatchBody, request, self._admission)
        if body.endpoint not in ENDPOINTS:
            raise InvalidArgumentError("endpoint", f"must be one of {', '.join(ENDPOINTS)}")
        batch = Batch(
            batch_id=new_batch_id(),
            client=caller(),
            endpoint=body.endpoint,
            input_file_id=body.input_file_id,
            completion_window_s=3600 * _hours(body.completion_window),
            metadata=_checked(body.metadata),
            created_at=int(time.time()),
        )
        if await asyncio.to_thread(self._store.num_unfinished, caller().owner) >= MAX_UNFINISHED:
            raise OverloadedError(f"{MAX_UNFINISHED} batches have not ended, the most for one tenant", retry_after_s=60)
        await asyncio.to_thread(self._store.add_batch, batch)
        self._runner.look()
        return json_response(batch.told())

    async def told(self, request: Request) -> Response:
        batch_id = request.path_params["batch_id"]
        return json_response((await asyncio.to_thread(self._store.batch, batch_id, caller().owner)).told())

    async def listed(self, request: Request) -> Response:
        batches = await asyncio.to_thread(self._store.listed_batches, caller().owner)
        return page(request, batches, lambda batch: batch.batch_id)

    async def cancel(self, request: Request) -> Response:
        batch = await asyncio.to_thread(self._store.cancel, request.path_params["batch_id"], caller().owner)
        self._runner.look()
        return json_response(batch.told())


class LineAnswers:
    """Has the lines of batches answered as requests of the clients whose batches they are, when there is room."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self.app: ASGIApp | None = None  # set once it is made

    async def __call__(self, batch: Batch, line: BatchLine) -> LineAnswer:
        assert self.app is not None  # noqa: S101 - batches are worked at when the router serves
        current_client.set(batch.client)  # of this line's task
        async with self._room.place():
            if batch.endpoint == EMBEDDINGS:  # which is short, and makes no way
                return await post(self.app, batch.endpoint, line.body, room=self._room)
        # Generation takes a place of its own, and leaves it when others come.
        return await post(self.app, batch.endpoint, line.body, room=self._room)


def _hours(window: str) -> int:
    """Raises `InvalidArgumentError`."""
    number = window.removesuffix("h")
    is_number = number.isascii() and number.isdecimal() and len(number) <= 4 and number != window
    if not is_number or not 1 <= int(number) <= MAX_WINDOW_H:
        raise InvalidArgumentError("completion_window", f'must be hours from "1h" to "{MAX_WINDOW_H}h", as "24h"')
    return int(number)


def _checked(metadata: dict[str, str] | None) -> dict[str, str] | None:
    """Raises `InvalidArgumentError`."""
    if metadata is not None and len(metadata) > MAX_METADATA:
        raise InvalidArgumentError("metadata", f"may have {MAX_METADATA} entries, not {len(metadata)}")
    for key, value in (metadata or {}).items():
        if len(key) > 64 or len(value) > 512:
            raise InvalidArgumentError(f"metadata.{key[:64]}", "may have 64 characters, and its value 512")
    return metadata
