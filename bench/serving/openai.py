"""An endpoint that speaks OpenAI's completions or chat completions over HTTP/1.1."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator, Mapping
from urllib.parse import urlsplit

import msgspec

from bench.load.http import Head, HttpConnections
from bench.serving.endpoint import Answer, Question, RefusedError, Target
from bench.serving.sse import Chunks, Events
from common.errors import ConfigError, InternalError

_READ_BYTES = 2**18
_DONE = b"[DONE]"
_NO_CALLS = (b"null", b"[]")
_SHOWN = 300  # characters of an error that are kept


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: msgspec.Raw = msgspec.Raw()


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None


class _CachedTokens(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _CachedTokens | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: msgspec.Raw = msgspec.Raw()


_DECODER = msgspec.json.Decoder(_Event)


class OpenAiEndpoint:
    """`target.url` may end in `/v1`. Raises `ConfigError` for a URL that is none."""

    def __init__(self, target: Target, *, is_chat: bool) -> None:
        parts = urlsplit(target.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError("--base-url", f"{target.url!r} is no URL: http://host:port is one")
        self._connections = HttpConnections(target.url, _tls(target.tls_ca) if parts.scheme == "https" else None)
        self._base = parts.path.rstrip("/").removesuffix("/v1") + "/v1"
        self._is_chat = is_chat
        head = {
            "Host": parts.netloc.rpartition("@")[2],
            "Content-Type": "application/json",
            "User-Agent": "baton-bench",
        }
        if target.api_key:
            head["Authorization"] = f"Bearer {target.api_key}"
        self._head = "".join(f"{name}: {value}\r\n" for name, value in head.items())
        self._body: dict[str, object] = {
            "stream": True,
            "stream_options": {"include_usage": True},
            **target.options,
        }
        if target.model:
            self._body["model"] = target.model

    def use_model(self, name: str) -> None:
        self._body["model"] = name

    async def model(self) -> str:
        answer = await self._whole(self._request("GET", "/models", b""))
        try:
            listed: str = json.loads(answer)["data"][0]["id"]
        except (ValueError, LookupError, TypeError) as error:
            raise InternalError(f"{self._base}/models lists no model") from error
        return listed

    async def ask(self, question: Question, answer: Answer) -> None:
        try:
            async with self._connections.asked(self._encoded(question)) as (head, reader):
                content = _content(head, reader)
                if head.status != 200:
                    body = b"".join([piece async for piece in content])
                else:
                    events = Events()
                    async for piece in content:
                        now = time.perf_counter()
                        for event in events.feed(piece):
                            if event != _DONE:
                                _read(event, now, answer)
                    return
        except (EOFError, OSError) as error:
            raise InternalError(f"the answer was cut off: {error}") from error
        raise RefusedError(str(head.status), _reason(head, body))

    def _encoded(self, question: Question) -> bytes:
        body: Mapping[str, object]
        if self._is_chat:
            messages = [{"role": role, "content": content} for role, content in question.messages]
            body = {**self._body, "max_tokens": question.max_tokens, "messages": messages}
            return self._request("POST", "/chat/completions", msgspec.json.encode(body))
        body = {**self._body, "max_tokens": question.max_tokens, "prompt": question.prompt}
        return self._request("POST", "/completions", msgspec.json.encode(body))

    def _request(self, method: str, path: str, body: bytes) -> bytes:
        length = f"Content-Length: {len(body)}\r\n" if body else ""
        return f"{method} {self._base}{path} HTTP/1.1\r\n{self._head}{length}\r\n".encode() + body

    async def _whole(self, request: bytes) -> bytes:
        try:
            async with self._connections.asked(request) as (head, reader):
                body = b"".join([piece async for piece in _content(head, reader)])
        except (EOFError, OSError) as error:
            raise InternalError(f"the answer was cut off: {error}") from error
        if head.status != 200:
            raise RefusedError(str(head.status), _reason(head, body))
        return body

    async def close(self) -> None:
        self._connections.close()


def _tls(ca: str) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca or None)
    except OSError as error:  # a file that is no certificate, too
        raise ConfigError("--tls-ca", f"{ca} is of no use: {error}") from error


async def _content(head: Head, reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """The body, in pieces as they come, to its end."""
    if "chunked" in head.fields.get("transfer-encoding", "").lower():
        chunks = Chunks()
        while not chunks.is_done:
            piece = chunks.feed(await _some(reader))
            if piece:
                yield piece
    elif head.length is not None:
        left = head.length
        while left:
            piece = await _some(reader, left)
            left -= len(piece)
            yield piece
    else:  # the body ends with the connection
        while piece := await reader.read(_READ_BYTES):
            yield piece


async def _some(reader: asyncio.StreamReader, most: int = _READ_BYTES) -> bytes:
    piece = await reader.read(min(most, _READ_BYTES))
    if not piece:
        raise EOFError("the connection was closed")
    return piece


def _read(data: bytes, now: float, answer: Answer) -> None:
    try:
        event = _DECODER.decode(data)
    except msgspec.DecodeError as error:
        raise InternalError(f"an event of the answer is of no use: {error}") from error
    if len(event.error) and bytes(event.error) != b"null":
        raise InternalError(f"the answer ended with an error: {bytes(event.error).decode(errors='replace')[:_SHOWN]}")
    if event.usage is not None:  # some servers send it with every event; the last one counts
        answer.prompt_tokens, answer.output_tokens = event.usage.prompt_tokens, event.usage.completion_tokens
        details = event.usage.prompt_tokens_details
        answer.cached_tokens = details.cached_tokens or 0 if details is not None else 0
    for choice in event.choices:
        delta = choice.delta
        text = choice.text
        if delta is not None:
            text = delta.content or delta.reasoning_content or delta.reasoning
            if not text and len(delta.tool_calls) and bytes(delta.tool_calls) not in _NO_CALLS:
                answer.token_times.append(now)
        if text:
            answer.token_times.append(now)
            answer.text.append(text)


def _reason(head: Head, body: bytes) -> str:
    return f"{head.phrase.strip()} {body.decode(errors='replace')}".strip()[:_SHOWN]
