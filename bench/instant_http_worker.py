"""A worker without an engine that speaks OpenAI's API, for measuring routers that stand in front of such workers.

    python -m bench.instant_http_worker [STEP_MS]

Prints `ready http=URL`. Its pace is that of `bench.instant_worker`: the first token at once, then one every STEP_MS
milliseconds (10). Each token is one event of the size that Baton's events have.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from typing import Any

import uvloop

from bench.steps import Steps

MODEL = "instant"
_CONTENT_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)\r\n", re.IGNORECASE)
_BASE = {"id": "chatcmpl-0123456789abcdef0123456789abcdef", "created": 1_700_000_000, "model": MODEL}
_DONE = b"data: [DONE]\n\n"


def _content(content_type: str, body: bytes) -> bytes:
    return f"HTTP/1.1 200 OK\r\ncontent-type: {content_type}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


def _event(delta: dict[str, str], finish_reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
    chunk = {**_BASE, "object": "chat.completion.chunk", "choices": [choice]}
    return b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"


def _chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


_ABOUT = {  # what the routers ask workers for before they send them anything
    "model_id": MODEL,
    "model_path": MODEL,
    "served_model_name": MODEL,
    "object": "list",
    "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "bench"}],
}
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_ROLE = _event({"role": "assistant", "content": ""})
_FIRST = _HEAD + _chunk(_ROLE) + _chunk(_event({"content": " The"}))
_TOKEN = _chunk(_event({"content": " quick"}))
_LAST = _chunk(_event({"content": " fox"}, "length")) + _chunk(_DONE) + b"0\r\n\r\n"


class InstantHttpWorker:
    def __init__(self, step_s: float) -> None:
        self._steps = Steps(step_s)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = _CONTENT_LENGTH.search(head)
                body = await reader.readexactly(int(length[1])) if length else b""
                if head.startswith(b"POST"):
                    await self._answer(json.loads(body), writer)
                else:
                    writer.write(_content("application/json", json.dumps(_ABOUT).encode()))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the router has closed it, as it may at any time
        finally:
            writer.close()

    async def _answer(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        num = body.get("max_tokens") or body["max_completion_tokens"]  # some routers rename it on the way
        if not body.get("stream"):
            message = {"role": "assistant", "content": " The" * num}
            choice = {"index": 0, "message": message, "finish_reason": "length"}
            usage = {"prompt_tokens": 1, "completion_tokens": num, "total_tokens": 1 + num}
            whole = {**_BASE, "object": "chat.completion", "choices": [choice], "usage": usage}
            writer.write(_content("application/json", json.dumps(whole).encode()))
            return
        writer.write(_FIRST)
        for _ in range(num - 2):
            await self._steps.next()
            writer.write(_TOKEN)
            await writer.drain()
        await self._steps.next()
        writer.write(_LAST)
        await writer.drain()


async def serve(step_s: float) -> None:
    worker = InstantHttpWorker(step_s)
    server = await asyncio.start_server(worker.serve, "127.0.0.1", 0, backlog=4096)
    port = server.sockets[0].getsockname()[1]
    print(f"ready http=http://127.0.0.1:{port}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(float(sys.argv[1] if len(sys.argv) > 1 else 10) / 1000))
