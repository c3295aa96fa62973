"""An endpoint that speaks OpenAI's completions or chat completions over HTTP/1.1."""

from __future__ import annotations

import json
import ssl
import time
from collections.abc import Mapping
from urllib.parse import urlsplit

import msgspec

from bench.load.http import Head, HttpConnections, content, request
from bench.load.sse import Events
from bench.serving.endpoint import Answer, Question, RefusedError, Target
from common.errors import ConfigError, InternalError

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
        self._host = parts.netloc.rpartition("@")[2]
        self._api_key = target.api_key
        self._base = parts.path.rstrip("/").removesuffix("/v1") + "/v1"
        self._is_chat = is_chat
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
        head, answer = await self._connections.whole(self._request("GET", "/models"))
        if head.status != 200:
            raise RefusedError(str(head.status), _reason(head, answer))
        try:
            listed: str = json.loads(answer)["data"][0]["id"]
        except (ValueError, LookupError, TypeError) as error:
            raise InternalError(f"{self._base}/models lists no model") from error
        return listed

    async def ask(self, question: Question, answer: Answer) -> None:
        try:
            async with self._connections.asked(self._encoded(question)) as (head, reader):
                pieces = content(head, reader)
                if head.status != 200:
                    body = b"".join([piece async for piece in pieces])
                else:
                    events = Events()
                    async for piece in pieces:
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

    def _request(self, method: str, path: str, body: bytes = b"") -> bytes:
        return request(method, self._base + path, body, api_key=self._api_key, host=self._host)

    async def close(self) -> None:
        self._connections.close()


def _tls(ca: str) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca or None)
    except OSError as error:  # a file that is no certificate, too
        raise ConfigError("--tls-ca", f"{ca} is of no use: {error}") from error


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
    return f"{head.phrase} {body.decode(errors='replace')}".strip()[:_SHOWN]
