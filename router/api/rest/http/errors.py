"""Answers that say what went wrong, in the shape of the interface that was asked."""

from __future__ import annotations

import logging
import math

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from common.errors import BatonError, InternalError, UnauthenticatedError
from router.api.rest.http.error_body import (
    ANTHROPIC_ID_HEADERS,
    REQUEST_ID_HEADERS,
    anthropic_body,
    error_body,
    has_anthropic_errors,
    status_body,
)
from router.running.request import new_request_id

log = logging.getLogger(__name__)


def json_response(
    content: object, *, status: int = 200, headers: dict[str, str] | None = None, request_id: str = ""
) -> Response:
    all_headers = dict(headers or {})
    if request_id:
        all_headers["X-Request-Id"] = request_id
    return Response(msgspec.json.encode(content), status, all_headers, "application/json")


def request_id_headers(request_id: str, path: str) -> dict[str, str]:
    """The headers of an answer at `path` that name its request."""
    return dict.fromkeys(ANTHROPIC_ID_HEADERS if has_anthropic_errors(path) else REQUEST_ID_HEADERS, request_id)


def error_response(error: BatonError, request_id: str = "", path: str = "") -> Response:
    """`path`: of the request; it decides the shape."""
    headers = error_headers(error)
    if has_anthropic_errors(path):
        return _anthropic_response(error.message, error.http_status, headers, request_id, path)
    return json_response(error_body(error), status=error.http_status, headers=headers, request_id=request_id)


def error_headers(error: BatonError) -> dict[str, str]:
    headers: dict[str, str] = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    if isinstance(error, UnauthenticatedError):
        headers["WWW-Authenticate"] = "Bearer"
    return headers


def _anthropic_response(message: str, status: int, headers: dict[str, str], request_id: str, path: str) -> Response:
    """Each of Anthropic's errors has a request's id, also if the request was refused before it had one."""
    request_id = request_id or new_request_id()
    body = anthropic_body(message, status, request_id)
    return json_response(body, status=status, headers={**headers, **request_id_headers(request_id, path)})


def as_baton(error: Exception) -> BatonError:
    if isinstance(error, BatonError):
        return error
    log.error("a handler failed", exc_info=error)
    return InternalError(f"internal error: {type(error).__name__}")


def install(app: FastAPI) -> None:
    """Makes every error answer of `app` one of the right shape, unknown paths and methods included."""

    async def on_http(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        detail = str(getattr(error, "detail", error))
        message = f"{request.method} {request.url.path}: {detail}"
        headers = dict(getattr(error, "headers", None) or {})
        if headers.get("Allow") == "GET":
            headers["Allow"] = "GET, HEAD"  # `DirectApp` answers it
        if has_anthropic_errors(path := _path(request)):
            return _anthropic_response(message, status, headers, "", path)
        return json_response(status_body(message, status, None, None), status=status, headers=headers)

    async def on_baton(request: Request, error: Exception) -> Response:
        return error_response(as_baton(error), path=_path(request))

    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(BatonError, on_baton)


def _path(request: Request) -> str:
    """Without what a proxy shows before it."""
    path: str = request.scope["path"]
    return path.removeprefix(request.scope.get("root_path", ""))
