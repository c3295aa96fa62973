"""Asks HTTP requests for their API key, before anything of them but their head is read."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from common.errors import UnauthenticatedError
from router.api.api_keys import ApiKeys, current_client
from router.api.rest.http.errors import error_response

OPEN_PATHS = frozenset({"/health", "/ping", "/metrics", "/v2/health/live", "/v2/health/ready"})
"""For probes and Prometheus. Everything else needs a key, unknown paths too."""


class KeyMiddleware:
    """An ASGI application around another."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            try:
                current_client.set(self._keys.client(_authorization(Headers(scope=scope)), "rest"))
            except UnauthenticatedError as error:
                await error_response(error, path=scope["path"])(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _authorization(headers: Headers) -> str | None:
    """`Authorization`, or what Anthropic's clients say in its place: `X-Api-Key: KEY`."""
    given = headers.get("authorization")
    if given is None and (key := headers.get("x-api-key")):
        return f"Bearer {key}"
    return given
