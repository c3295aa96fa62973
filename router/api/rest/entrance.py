"""The entrance of REST: what each HTTP request passes on its way to its handler, from the outside in.

EchoMiddleware   headers that go back with its answer
LimitMiddleware  its place among the requests in flight, the bytes that it may hold, and its time
DirectApp        from its path to its handler
guarded          whatever happens in the handler becomes an answer

`router.server` puts what settings ask for between the first two: who asks (keys), the live page, CORS.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager

from fastapi import Request
from fastapi.responses import Response
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common import metrics
from common.errors import BatonError, DeadlineError, OverloadedError
from router.api.api_keys import current_client
from router.api.echo import ECHOED, goes_back
from router.api.rest.http.auth import OPEN_PATHS
from router.api.rest.http.error_body import HeadTooLargeError
from router.api.rest.http.errors import as_baton, error_response
from router.api.rest.http.protocol import MAX_HEAD_BYTES
from router.api.rest.in_process import ROOM
from router.api.rest.openai.disconnect import ClientGoneError
from router.limits.gate import Gate

Endpoint = Callable[[Request], Awaitable[Response]]
Failed = Callable[[Request, BatonError], Response]

CLIENT_GONE_STATUS = 499  # nobody reads it; access logs know it
_ECHOED = frozenset(name.encode() for name in ECHOED)


class EchoMiddleware:
    """An ASGI application around another. Headers that the other sets itself stay as they are (`router.api.echo`)."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        found = [one for one in scope["headers"] if one[0] in _ECHOED]
        found = [one for one in found if goes_back(one[0].decode(), one[1].decode("latin-1"))]
        if not found:
            await self._app(scope, receive, send)
            return

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = message["headers"]
                known = {name.lower() for name, _ in headers}
                message = {**message, "headers": [*headers, *(one for one in found if one[0] not in known)]}
            await send(message)

        await self._app(scope, receive, sending)


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


class DirectApp:
    """The way of the requests that models answer: straight to their handlers. Routing, exception handlers and
    dependency injection are a dozen calls around each request, and around each piece of an answer that is sent. These
    handlers need none of it: a path is looked up in a table, and failures are answers already.

    An ASGI application that takes POST requests to the paths of `handlers`, and leaves all else to `app`. `handlers`
    answer failures, too: they raise nothing.

    `app` is asked GET where a client asks HEAD: the connection leaves the answer's body out. It is told of `root_path`,
    which redirects have to begin with."""

    def __init__(self, app: ASGIApp, handlers: Mapping[str, Endpoint], root_path: str = "") -> None:
        self._app = app
        self._handlers = handlers
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        handler = self._handlers.get(scope["path"]) if is_post else None
        if handler is None:
            await self._app(self._for_app(scope), receive, send)
            return
        response = await handler(Request(scope, receive))
        await response(scope, receive, send)

    def _for_app(self, scope: Scope) -> Scope:
        if scope["type"] != "http" or (scope["method"] != "HEAD" and not self._root_path):
            return scope
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        return {**scope, "method": method, "root_path": self._root_path, "path": self._root_path + scope["path"]}


def in_shape_of_path(request: Request, error: BatonError) -> Response:
    return error_response(error, getattr(request.state, "request_id", ""), request.scope["path"])


def guarded(handler: Endpoint, failed: Failed = in_shape_of_path) -> Endpoint:
    """Every failure of `handler` becomes the answer that `failed` makes of it."""

    async def answering(request: Request) -> Response:
        try:
            return await handler(request)
        except (ClientGoneError, ClientDisconnect):  # while its answer was made, or in the middle of its body
            return Response(status_code=CLIENT_GONE_STATUS)
        except Exception as error:
            return failed(request, as_baton(error))

    return answering
