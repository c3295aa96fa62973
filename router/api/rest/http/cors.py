"""Pages of other sites that ask over REST: cross-origin resource sharing (CORS) of the Fetch standard.

A browser asks first (a preflight: OPTIONS without a key) whether a page may send what it wants to, and shows the page
an answer only if its headers allow that. So each answer has them: errors, refusals for want of a key, and streams too.
A preflight is no request: it needs no key and no place among those in flight.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.errors import ConfigError
from router.api.rest.http.error_body import status_body
from router.api.rest.http.errors import json_response

METHODS = "GET, HEAD, POST"
EXPOSED = (
    "X-Request-Id, Request-Id, Retry-After"  # headers of answers that a page may read, beside those that it always may
)
MAX_AGE_S = 600  # for which a browser may remember a preflight's answer
MAX_ASKED_BYTES = 4096  # of headers' names in a preflight


class CorsMiddleware:
    """An ASGI application around those that ask for keys. Raises `ConfigError` if `credentials` go with any origin: any
    page of the web could then ask in the name of whoever looks at it."""

    def __init__(self, app: ASGIApp, origins: Sequence[str], *, credentials: bool) -> None:
        self._app = app
        self._origins = frozenset(origins)
        self._any = "*" in self._origins
        self._credentials = credentials
        if credentials and not origins:
            raise ConfigError("cors_credentials", "is for the pages of --cors-origins, and there are none")
        if credentials and self._any:
            raise ConfigError("cors_credentials", "needs --cors-origins that name the sites: * is all of them")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        allowed = self._allowed(origin)
        if scope["method"] == "OPTIONS" and origin is not None and "access-control-request-method" in headers:
            await self._preflight(headers, allowed)(scope, receive, send)
            return
        if self._is_known(origin):
            allowed = [*allowed, (b"access-control-expose-headers", EXPOSED.encode())]

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *allowed]}
            await send(message)

        await self._app(scope, receive, sending)

    def _is_known(self, origin: str | None) -> bool:
        return origin is not None and (self._any or origin.lower() in self._origins)

    def _allowed(self, origin: str | None) -> list[tuple[bytes, bytes]]:
        """Headers of every answer. Caches have to keep answers apart that differ by origin, also one without any."""
        if self._any:
            return [] if origin is None else [(b"access-control-allow-origin", b"*")]
        vary = (b"vary", b"Origin")
        if origin is None or not self._is_known(origin):
            return [vary]
        named = [(b"access-control-allow-origin", origin.encode("latin-1")), vary]
        return [*named, (b"access-control-allow-credentials", b"true")] if self._credentials else named

    def _preflight(self, headers: Headers, allowed: list[tuple[bytes, bytes]]) -> Response:
        origin = headers["origin"]
        if not self._is_known(origin):
            message = f"pages of {origin[:100]} may not ask here: it is none of --cors-origins"
            response = json_response(status_body(message, 403, None, None), status=403)
        else:
            response = Response(status_code=204)
            response.headers["Access-Control-Allow-Methods"] = METHODS
            response.headers["Access-Control-Max-Age"] = str(MAX_AGE_S)
            response.headers["Vary"] = "Access-Control-Request-Headers"
            asked = headers.get("access-control-request-headers", "")
            if asked and len(asked) <= MAX_ASKED_BYTES:  # * would leave Authorization out
                response.headers["Access-Control-Allow-Headers"] = asked
        response.raw_headers.extend(allowed)
        return response
