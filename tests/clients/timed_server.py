"""A server of OpenAI's API whose answers come by the clock: what a benchmark must find is known before."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

MODEL = "timed"
_CHUNKED = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


class TimedServer:
    """Each answer has as many tokens as are asked for: the first after `ttft_s`, one more every `gap_s`."""

    def __init__(self, ttft_s: float, gap_s: float) -> None:
        self._ttft_s, self._gap_s = ttft_s, gap_s
        self.num_answers = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        try:
            while True:
                first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower().split("\r\n")
                fields = dict(line.split(": ", 1) for line in lines if line)
                content = await reader.readexactly(int(fields.get("content-length", 0)))
                method, path, _ = first.split(" ")
                if method == "post" and path in ("/v1/completions", "/v1/chat/completions"):
                    await self._answer(json.loads(content), path.startswith("/v1/chat"), writer)
                else:
                    self._tell(path, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    def _tell(self, path: str, writer: asyncio.StreamWriter) -> None:
        known = {"/health": {}, "/v1/models": {"object": "list", "data": [{"id": MODEL, "object": "model"}]}}
        status = "200 OK" if path in known else "404 Not Found"
        body = json.dumps(known.get(path, {})).encode()
        head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)

    async def _answer(self, asked: dict[str, Any], is_chat: bool, writer: asyncio.StreamWriter) -> None:
        num_tokens = asked.get("max_completion_tokens") or asked["max_tokens"]
        options = asked.get("stream_options") or {}
        num_prompt = len(str(asked.get("prompt") or asked.get("messages")).split())
        kind = "chat.completion.chunk" if is_chat else "text_completion"
        base = {"id": f"timed-{self.num_answers}", "object": kind, "created": 1_700_000_000, "model": MODEL}
        self.num_answers += 1

        def event(choices: list[dict[str, Any]], num_so_far: int, *, has_usage: bool) -> bytes:
            usage = {
                "prompt_tokens": num_prompt,
                "completion_tokens": num_so_far,
                "total_tokens": num_prompt + num_so_far,
            }
            told = json.dumps({**base, "choices": choices} | ({"usage": usage} if has_usage else {}))
            return chunk(f"data: {told}\n\n".encode())

        clock = asyncio.get_running_loop()
        begin = clock.time()
        writer.write(_CHUNKED)
        for number in range(num_tokens):
            await asyncio.sleep(begin + self._ttft_s + number * self._gap_s - clock.time())
            text = {"delta": {"content": " quick"}} if is_chat else {"text": " quick"}
            choice = {"index": 0, **text, "finish_reason": "length" if number == num_tokens - 1 else None}
            writer.write(event([choice], number + 1, has_usage=bool(options.get("continuous_usage_stats"))))
        if options.get("include_usage"):
            writer.write(event([], num_tokens, has_usage=True))
        writer.write(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        await writer.drain()


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


@contextmanager
def timed_server(ttft_s: float, gap_s: float) -> Iterator[str]:
    """Its URL, while inside. It runs in a thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="timed server")
    thread.start()
    try:
        server = asyncio.run_coroutine_threadsafe(
            asyncio.start_server(TimedServer(ttft_s, gap_s).serve, "127.0.0.1", 0), loop
        ).result(10)
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        asyncio.run_coroutine_threadsafe(_end(server), loop).result(10)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _end(server: asyncio.Server) -> None:
    server.close()
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await asyncio.sleep(0)
