"""The way of the requests that models answer: straight to their handlers, past everything that other paths need.

Routing, exception handlers and dependency injection are a dozen calls around each request, and around each piece of an
answer that is sent. These handlers need none of it: a path is looked up in a table, and failures are answers already.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from fastapi import Request
from fastapi.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

Endpoint = Callable[[Request], Awaitable[Response]]


class DirectApp:
    """An ASGI application that takes POST requests to the paths of `handlers`, and leaves all else to `app`. `handlers`
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
