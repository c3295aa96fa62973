"""Asks an ASGI application without a connection, so that what a router asks itself is answered as clients' requests
are."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Scope

from router.batches.records import LineAnswer
from router.running.room import Room

ROOM = "room"  # of a request's state: that of batches, whose requests have no time limit but their batch's


async def post(
    app: ASGIApp, path: str, body: bytes, headers: Sequence[tuple[bytes, bytes]] = (), *, room: Room | None = None
) -> LineAnswer:
    """The whole answer. Cancelling this ends the request, as if its client had left. `room`: see `ROOM`."""
    status, request_id = 500, ""
    parts: list[bytes] = []
    waiting = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if waiting:
            return waiting.pop()
        await asyncio.Future()  # the client stays
        raise AssertionError

    async def send(message: Message) -> None:
        nonlocal status, request_id
        if message["type"] == "http.response.start":
            status = message["status"]
            request_id = dict(message["headers"]).get(b"x-request-id", b"").decode("latin-1")
        else:
            parts.append(message.get("body", b""))

    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json"), *headers],
        "client": None,
        "server": None,
        "state": {} if room is None else {ROOM: room},
    }
    await app(scope, receive, send)
    return LineAnswer(status, request_id, b"".join(parts))
