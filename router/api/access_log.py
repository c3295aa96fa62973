"""A line in the log for each call of a client, or for a share of them (`--access-log`)."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.api.api_keys import current_client

log = logging.getLogger(__name__)

MAX_PATH_CHARS = 200
OUR_FAULT = frozenset({"INTERNAL", "UNAVAILABLE", "UNKNOWN"})  # statuses of gRPC


class AccessLog:
    """Shared by both interfaces of a router."""

    def __init__(self, share: float, draw: Callable[[], float] = random.random) -> None:
        """`share`: of the calls that have a line, from 0 to 1; those that failed by a fault here have one anyway."""
        self._share = share
        self._draw = draw

    def ended(self, interface: str, call: str, status: str, began_at: float, **more: object) -> None:
        """A call ended; `status` is HTTP's or gRPC's. `began_at`: seconds of the monotonic clock."""
        is_fault = status in OUR_FAULT or status.startswith("5")
        if not is_fault and self._draw() >= self._share:
            return
        client = current_client.get()
        facts = {"interface": interface, "call": call, "status": status, **more}
        facts["ms"] = round(1000 * (time.monotonic() - began_at), 1)
        log.info("access", extra=facts if client is None else {**facts, "client": client.name})

    async def around(self, call: str, context: grpc.aio.ServicerContext[Any, Any], handling: Awaitable[None]) -> None:
        """Awaits the handling of a call over gRPC."""
        began_at, status = time.monotonic(), "OK"
        try:
            await handling
        except asyncio.CancelledError:
            status = "CANCELLED"
            raise
        except grpc.aio.AbortError:
            status = _name(context)
            raise
        except BaseException:
            status = "UNKNOWN"
            raise
        finally:
            self.ended("grpc", call, status, began_at)


def _name(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """The call's status: gRPC tells it as a number."""
    code = context.code()
    return next((one.name for one in grpc.StatusCode if code in (one, one.value[0])), "UNKNOWN")


class AccessLogMiddleware:
    """An ASGI application around another."""

    def __init__(self, app: ASGIApp, access_log: AccessLog) -> None:
        self._app = app
        self._access_log = access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began_at, status, num_bytes, request_id = time.monotonic(), "499", 0, ""  # nobody was there to read an answer

        async def sending(message: Message) -> None:
            nonlocal status, num_bytes, request_id
            if message["type"] == "http.response.start":
                status = str(message["status"])
                request_id = dict(message["headers"]).get(b"x-request-id", b"").decode("latin-1")
            else:
                num_bytes += len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receive, sending)
        finally:
            call = f"{scope['method']} {scope['path'][:MAX_PATH_CHARS]}"
            self._access_log.ended("rest", call, status, began_at, request_id=request_id, num_bytes=num_bytes)
