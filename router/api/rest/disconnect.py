"""A client that goes away ends its request: nobody would read the rest."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import TypeVar

from fastapi import Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

ResultT = TypeVar("ResultT")


class ClientGoneError(Exception):
    """Nobody is left to answer."""


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(request: Request, work: Coroutine[object, object, ResultT]) -> ResultT:
    """Runs `work`, and cancels it when the client disconnects. The body must have been read.

    Raises `ClientGoneError` then.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_gone(request.receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        await _end(task, watcher)
        del task, watcher  # a failure's stack holds this frame, which would hold the failure: a body kept for nothing


async def _end(*tasks: asyncio.Future[ResultT] | asyncio.Future[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class EventStream(Response):
    """Sends server-sent events until they end or the client disconnects; either way `events` is closed."""

    media_type = "text/event-stream"

    def __init__(self, first: bytes, events: AsyncGenerator[bytes, None], headers: dict[str, str]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers})
        del self.headers["content-length"]
        self._first = first
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope
        task = asyncio.ensure_future(self._send(send))
        watcher = asyncio.ensure_future(_gone(receive))
        async with aclosing(self._events):
            try:
                await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
                if task.done():
                    task.result()
            finally:
                await _end(task, watcher)
                del task, watcher  # as above

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
