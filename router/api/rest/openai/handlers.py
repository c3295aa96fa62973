"""What the handlers of REST requests have in common. They raise `BatonError`, which `app` makes an answer of."""

from __future__ import annotations

from fastapi import Request

from common.validation import check_request_id
from router.api.rest.http.body import read_body
from router.running.request import new_request_id
from router.serving.gateway import Gateway


class Handlers:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def _read(self, request: Request) -> bytes:
        admission = self._gateway.admission
        return await read_body(request, admission.max_request_bytes(), admission.gate.limits.receive_timeout_s)


def request_id_of(request: Request, given: str | None) -> str:
    """The request's id: the client's, `given` in the body or else in the header, or a new one. From here on each answer
    carries it, errors included."""
    name = "request_id"
    if given is None:
        name, given = "X-Request-Id", request.headers.get("x-request-id")
    if given is None:
        given = new_request_id()
    else:
        check_request_id(given, name)
    request.state.request_id = given
    return given
