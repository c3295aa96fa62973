"""Reads the body of a REST request, within limits of size and time: JSON, unless a path takes other types, too."""

from __future__ import annotations

import asyncio

from fastapi import Request
from starlette.requests import ClientDisconnect

from common import metrics
from router.api.rest.http.error_body import BodyTooLargeError, BodyTooLateError, BodyTypeError
from router.api.rest.http.protocol import TAKE_BODY, TakeBody
from router.limits.gate import HeldBytes

JSON_TYPE = "application/json"


def check_type(request: Request, types: tuple[str, ...] = (JSON_TYPE,)) -> None:
    """Raises `BodyTypeError` if the body is said to be of none of these types, or is compressed.

    A page of any other site may have its visitors' browsers send a body of another type, or of none, without asking
    first (a "simple request" of the Fetch standard), and such a body could be JSON all the same. So a page, which shows
    by `Origin`, has to say the type; other clients need not.
    """
    has_type = has_origin = False
    for name, value in request.scope["headers"]:
        if name == b"content-type" and value:
            has_type = True
            if value != b"application/json" and not _is_one_of(value.decode("latin-1"), types):
                known = " or ".join(types)
                raise BodyTypeError(f"the body must be {known}, not {value.decode('latin-1')[:100]!r}")
        elif name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
            raise BodyTypeError(
                f"the body must not be compressed: Content-Encoding is {value.decode('latin-1')[:100]!r}"
            )
        elif name == b"origin":
            has_origin = True
    if has_origin and not has_type:
        raise BodyTypeError(f"a page has to say that its body is {JSON_TYPE}: Content-Type is missing")


def _is_one_of(content_type: str, types: tuple[str, ...]) -> bool:
    kind = content_type.partition(";")[0].strip().lower()
    main, _, sub = kind.partition("/")
    return kind in types or (main == "application" and sub.endswith("+json") and len(sub) > len("+json"))


async def read_body(request: Request, limit: int, timeout_s: float, types: tuple[str, ...] = (JSON_TYPE,)) -> bytes:
    """Reads at most `limit` bytes, which count as held until the answer has ended.

    Raises `BodyTypeError`, `BodyTooLargeError` as soon as it is known, so that a huge body is not read to its end,
    `BodyTooLateError`, and `OverloadedError` if the router holds too much already.
    """
    check_type(request, types)
    held: HeldBytes = request.state.held_bytes
    take: TakeBody | None = request.scope.get(TAKE_BODY)
    if take is not None and (body := take()) is not None:  # of most requests: a timer would cost more than the rest
        if len(body) > limit:
            raise _too_large(limit)
        held.add(len(body))
        return body
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and len(declared) < 20 and int(declared) > limit:
        raise _too_large(limit)
    chunks: list[bytes] = []
    size = 0
    is_whole = False
    try:
        async with asyncio.timeout(timeout_s):
            while not is_whole:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                chunk, is_whole = message.get("body", b""), not message.get("more_body", False)
                size += len(chunk)
                if size > limit:
                    raise _too_large(limit)
                held.add(len(chunk))
                chunks.append(chunk)
    except TimeoutError as error:
        metrics.router_refused.labels("body time").inc()
        raise BodyTooLateError(f"the body did not come within {timeout_s:g} s") from error
    return b"".join(chunks)


def _too_large(limit: int) -> BodyTooLargeError:
    metrics.router_refused.labels("body size").inc()
    return BodyTooLargeError(f"the body has more than {limit} bytes, which this model's context cannot need")
