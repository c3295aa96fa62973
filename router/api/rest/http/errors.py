"""Answers that say what went wrong, in OpenAI's shape."""

from __future__ import annotations

import logging
import math

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from common.errors import BatonError, InternalError, UnauthenticatedError
from router.api.rest.http.error_body import error_body, status_body

log = logging.getLogger(__name__)


def json_response(
    content: object, *, status: int = 200, headers: dict[str, str] | None = None, request_id: str = ""
) -> Response:
    all_headers = dict(headers or {})
    if request_id:
        all_headers["X-Request-Id"] = request_id
    return Response(msgspec.json.encode(content), status, all_headers, "application/json")


def error_response(error: BatonError, request_id: str = "") -> Response:
    headers = error_headers(error)
    return json_response(error_body(error), status=error.http_status, headers=headers, request_id=request_id)


def error_headers(error: BatonError) -> dict[str, str]:
    headers: dict[str, str] = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    if isinstance(error, UnauthenticatedError):
        headers["WWW-Authenticate"] = "Bearer"
    return headers


def as_baton(error: Exception) -> BatonError:
    if isinstance(error, BatonError):
        return error
    log.error("a handler failed", exc_info=error)
    return InternalError(f"internal error: {type(error).__name__}")


def install(app: FastAPI) -> None:
    """Makes every error answer of `app` one of OpenAI's shape, unknown paths and methods included."""

    async def on_http(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        detail = str(getattr(error, "detail", error))
        message = f"{request.method} {request.url.path}: {detail}"
        headers = dict(getattr(error, "headers", None) or {})
        if headers.get("Allow") == "GET":
            headers["Allow"] = "GET, HEAD"  # `DirectApp` answers it
        return json_response(status_body(message, status, None, None), status=status, headers=headers)

    async def on_baton(_request: Request, error: Exception) -> Response:
        return error_response(as_baton(error))

    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(BatonError, on_baton)
