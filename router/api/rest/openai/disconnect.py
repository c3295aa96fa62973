"""A client that goes away ends its request: nobody would read the rest."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from typing import TypeVar

from fastapi import Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from router.api.rest.http.protocol import ON_GONE, WRITE_PIECE, OnGone, WritePiece
from router.api.rest.openai.large_json import PART_BYTES

ResultT = TypeVar("ResultT")


class ClientGoneError(Exception):
    """Nobody is left to answer."""


class _Presence:
    """Around work of the current task for one client. When the client disconnects, the work is cancelled, and
    `ClientGoneError` takes the place of its cancellation."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        """The request's body must have been read."""
        self._on_gone: OnGone | None = scope.get(ON_GONE)
        self._receive = receive
        self._is_gone = self._has_ended = False

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - a coroutine's caller is a task
        self._task = task
        self._num_cancels = task.cancelling()
        if self._on_gone is not None:  # a task for each request would cost more than all else here
            self._on_gone(self._gone)
        else:
            self._watcher = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._gone()

    def _gone(self) -> None:
        if not self._has_ended:
            self._is_gone = True
            self._task.cancel()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        self._has_ended = True
        if self._on_gone is not None:
            self._on_gone(None)
        else:
            self._watcher.cancel()
            del self._watcher
        is_ours = self._is_gone and self._task.uncancel() <= self._num_cancels  # and of nobody who stops this task
        if is_ours and kind is asyncio.CancelledError:
            raise ClientGoneError from error


async def unless_gone(request: Request, work: Awaitable[ResultT]) -> ResultT:
    """Awaits `work`, and cancels it when the client disconnects. The body must have been read.

    Raises `ClientGoneError` then.
    """
    with _Presence(request.scope, request.receive):
        return await work


async def json_answer(request: Request, parts: AsyncGenerator[bytes, None], headers: dict[str, str]) -> Response:
    """An answer whose JSON comes in parts of `PART_BYTES`: at once if it is one, else in a stream that goes as fast as
    the client takes it. Closes `parts`."""
    try:
        first = await unless_gone(request, anext(parts))
        if len(first) < PART_BYTES:
            await anext(parts, None)  # to its end: closed before, it would count as cancelled
            return Response(first, headers=headers, media_type="application/json")
    except BaseException:
        await parts.aclose()
        raise
    return PartStream(first, parts, headers)


class PartStream(Response):
    """Sends parts of an answer until they end or the client disconnects; either way `parts` is closed."""

    media_type = "application/json"

    def __init__(self, first: bytes, parts: AsyncGenerator[bytes, None], headers: dict[str, str]) -> None:
        super().__init__(headers=headers)
        del self.headers["content-length"]
        self._first = first
        self._parts = parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._parts):
            with contextlib.suppress(ClientGoneError), _Presence(scope, receive):
                await self._send(send, scope.get(WRITE_PIECE))

    async def _send(self, send: Send, write_piece: WritePiece | None) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        if write_piece is None:
            await send({"type": "http.response.body", "body": self._first, "more_body": True})
            async for part in self._parts:
                await send({"type": "http.response.body", "body": part, "more_body": True})
        else:
            if (written := write_piece(self._first)) is not None:
                await written
            async for part in self._parts:
                if (written := write_piece(part)) is not None:
                    await written
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class EventStream(PartStream):
    """Sends server-sent events."""

    media_type = "text/event-stream"

    def __init__(self, first: bytes, parts: AsyncGenerator[bytes, None], headers: dict[str, str]) -> None:
        super().__init__(first, parts, {"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers})
