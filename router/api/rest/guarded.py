"""Around each handler of REST: whatever happens in it becomes an answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import Request
from fastapi.responses import Response
from starlette.requests import ClientDisconnect

from common.errors import BatonError
from router.api.rest.http.errors import as_baton, error_response
from router.api.rest.openai.disconnect import ClientGoneError

Endpoint = Callable[[Request], Awaitable[Response]]
Failed = Callable[[Request, BatonError], Response]

CLIENT_GONE_STATUS = 499  # nobody reads it; access logs know it


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
