"""Reads the body of a REST request, within limits of size and time."""

from __future__ import annotations

import asyncio

from fastapi import Request
from starlette.requests import ClientDisconnect

from router.api.rest.error_body import BodyTooLargeError, BodyTooLateError
from router.serving.gate import HeldBytes


async def read_body(request: Request, limit: int, timeout_s: float) -> bytes:
    """Reads at most `limit` bytes, which count as held until the answer has ended.

    Raises `BodyTooLargeError` as soon as it is known, so that a huge body is not read to its end, `BodyTooLateError`,
    and `OverloadedError` if the router holds too much already.
    """
    held: HeldBytes = request.state.held_bytes
    declared = request.headers.get("content-length", "0")
    chunks: list[bytes] = []
    size = int(declared) if declared.isdecimal() and len(declared) < 20 else 0
    try:
        async with asyncio.timeout(timeout_s):
            if size <= limit:
                size = 0
                is_whole = False
                while not is_whole and size <= limit:
                    message = await request.receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnect
                    chunk, is_whole = message.get("body", b""), not message.get("more_body", False)
                    size += len(chunk)
                    if size <= limit:
                        held.add(len(chunk))
                        chunks.append(chunk)
    except TimeoutError as error:
        raise BodyTooLateError(f"the body did not come within {timeout_s:g} s") from error
    if size > limit:
        raise BodyTooLargeError(f"the body has more than {limit} bytes, which this model's context cannot need")
    return b"".join(chunks)
