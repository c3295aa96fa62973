"""Headers by which callers and proxies find a call again: what came with it goes back with its answer, whatever
becomes of it. Over REST as headers, over gRPC as trailing metadata: headers before an answer would end gRPC's own
retries of a refused call.
"""

from __future__ import annotations

from collections.abc import Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.errors import InvalidArgumentError
from common.tracing import TRACEPARENT
from common.validation import check_request_id
from router.limits.clients import REQUEST_ID_HEADER
from router.limits.targets import TARGET_HEADERS

ECHOED = frozenset({REQUEST_ID_HEADER, TRACEPARENT, *TARGET_HEADERS})
MAX_CHARS = 512
_WIRED = frozenset(name.encode() for name in ECHOED)


def echoed(metadata: Iterable[tuple[str, str | bytes]] | None) -> tuple[tuple[str, str], ...]:
    """What of a gRPC call's metadata goes back."""
    return tuple(
        (name, value)
        for name, value in metadata or ()
        if name in ECHOED and isinstance(value, str) and _goes_back(name, value)
    )


def _goes_back(name: str, value: str) -> bool:
    if name == REQUEST_ID_HEADER:
        try:
            check_request_id(value)
        except InvalidArgumentError:
            return False
    return len(value) <= MAX_CHARS and value.isascii() and value.isprintable()


class EchoMiddleware:
    """An ASGI application around another. Headers that the other sets itself stay as they are."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        found = [one for one in scope["headers"] if one[0] in _WIRED]
        found = [one for one in found if _goes_back(one[0].decode(), one[1].decode("latin-1"))]
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
