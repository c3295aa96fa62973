"""What holds for every HTTP request, whatever its path: its place among the requests in flight, and its time."""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import AbstractContextManager

from starlette.types import ASGIApp, Receive, Scope, Send

from common import metrics
from common.errors import DeadlineError, OverloadedError
from router.api.api_keys import current_client
from router.api.rest.http.auth import OPEN_PATHS
from router.api.rest.http.error_body import HeadTooLargeError
from router.api.rest.http.errors import error_response
from router.api.rest.http.protocol import MAX_HEAD_BYTES
from router.api.rest.in_process import ROOM
from router.limits.gate import Gate


class LimitMiddleware:
    """An ASGI application around another, inside the one that asks for keys."""

    def __init__(self, app: ASGIApp, gate: Gate) -> None:
        self._app = app
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and _head_bytes(scope) > MAX_HEAD_BYTES:  # one that came at once, h11 lets it pass
            metrics.router_refused.labels("head size").inc()
            error = HeadTooLargeError(f"the request's head has more than {MAX_HEAD_BYTES} bytes")
            await error_response(error, path=scope["path"])(scope, receive, send)
            return
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        try:
            with self._place(scope), self._gate.bytes_held() as held:
                scope.setdefault("state", {})["held_bytes"] = held
                await self._timed(scope, receive, send)
        except OverloadedError as error:  # nothing was sent: only the gate raises it here
            await error_response(error, path=scope["path"])(scope, receive, send)

    def _place(self, scope: Scope) -> AbstractContextManager[None]:
        """A line of a batch has none: it may be paused for hours, and the batches' room bounds how many there are."""
        if ROOM in scope.get("state", ()):
            return contextlib.nullcontext()
        client = current_client.get()
        return self._gate.requests(client.name if client else "")

    async def _timed(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A client that takes its answer too slowly is cut off."""
        has_begun = False

        async def sending(message: object) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)  # type: ignore[arg-type]

        limit_s = None if ROOM in scope["state"] else self._gate.limits.answer_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                await self._app(scope, receive, sending)
        except TimeoutError:
            if not has_begun:
                error = DeadlineError("the answer took too long")
                await error_response(error, path=scope["path"])(scope, receive, send)


def _head_bytes(scope: Scope) -> int:
    target = len(scope["raw_path"]) + len(scope["query_string"])
    return target + sum(len(name) + len(value) + len(b": \r\n") for name, value in scope["headers"])
