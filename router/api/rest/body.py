"""Reads the body of a REST request, within limits of size and time."""

from __future__ import annotations

import asyncio

from fastapi import Request
from starlette.requests import ClientDisconnect

from router.api.rest.error_body import BodyTooLargeError, BodyTooLateError
from router.api.rest.protocol import TAKE_BODY, TakeBody
from router.serving.gate import HeldBytes


async def read_body(request: Request, limit: int, timeout_s: float) -> bytes:
    """Reads at most `limit` bytes, which count as held until the answer has ended.

    Raises `BodyTooLargeError` as soon as it is known, so that a huge body is not read to its end, `BodyTooLateError`,
    and `OverloadedError` if the router holds too much already.
    """
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
        raise BodyTooLateError(f"the body did not come within {timeout_s:g} s") from error
    return b"".join(chunks)


def _too_large(limit: int) -> BodyTooLargeError:
    return BodyTooLargeError(f"the body has more than {limit} bytes, which this model's context cannot need")
