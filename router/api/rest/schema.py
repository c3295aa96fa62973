"""Bodies of REST requests. Types are strict, and a field that is neither supported nor harmless is refused by name.

What is only a matter of range is left to `common.validation`, which gRPC shares.
"""

from __future__ import annotations

import json
import re
from typing import ClassVar, TypeVar

from fastapi import Request
from pydantic import BaseModel, ConfigDict, ValidationError

from common.errors import InvalidArgumentError
from common.validation import SamplingFields, chat_role
from router.api.rest.errors import BodyTooLargeError
from router.serving.chat_template import Message

MAX_BODY_BYTES = 64 << 20
MAX_N = 8
MAX_CHOICES = 128

BodyT = TypeVar("BodyT", bound=BaseModel)


class Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=())


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class GenerationBody(Body):
    """What chat and text completion have in common."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    # Baton's own, by the names that they have in gRPC.
    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    repetition_penalty: float | None = None
    cache_salt: str | None = None
    priority: int | None = None
    request_id: str | None = None
    add_special_tokens: bool | None = None

    # OpenAI's, without a meaning here.
    user: object = None
    metadata: object = None
    store: object = None
    service_tier: object = None
    safety_identifier: object = None
    prompt_cache_key: object = None
    prompt_cache_retention: object = None
    prompt_cache_options: object = None

    unsupported: ClassVar[tuple[str, ...]] = ()

    def check(self) -> None:
        """Raises `InvalidArgumentError` for what is well formed and still cannot be done."""
        for name in self.unsupported:
            if getattr(self, name):  # null, false and empty ask for nothing
                raise InvalidArgumentError(name, "is not supported")
        if not 1 <= self.num_choices <= MAX_N:
            raise InvalidArgumentError("n", f"must be in [1, {MAX_N}], not {self.n}")
        if self.stream_options is not None and not self.stream:
            raise InvalidArgumentError("stream_options", "is only allowed with stream")

    @property
    def num_choices(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def wants_usage_chunk(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def sampling_fields(self, max_tokens: int | None, logprobs: int | None) -> SamplingFields:
        return SamplingFields(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=self.seed,
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=self.ignore_eos,
            logprobs=logprobs,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=_logit_bias(self.logit_bias),
        )


class ChatBody(GenerationBody):
    messages: list[dict[str, object]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: dict[str, object] | None = None
    modalities: list[str] | None = None
    tool_choice: object = None
    parallel_tool_calls: object = None  # without tools it asks for nothing
    tools: list[object] | None = None
    functions: list[object] | None = None
    function_call: object = None
    audio: object = None
    prediction: object = None
    reasoning_effort: object = None
    verbosity: object = None
    web_search_options: object = None

    unsupported = (
        "tools",
        "functions",
        "audio",
        "prediction",
        "reasoning_effort",
        "verbosity",
        "web_search_options",
    )

    def check(self) -> None:
        super().check()
        if self.response_format is not None and self.response_format != {"type": "text"}:
            raise InvalidArgumentError("response_format", 'only {"type": "text"} is supported')
        if self.modalities not in (None, [], ["text"]):
            raise InvalidArgumentError("modalities", 'only ["text"] is supported')
        for name in ("tool_choice", "function_call"):
            if getattr(self, name) not in (None, "none", "auto"):
                raise InvalidArgumentError(name, "tools are not supported")
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidArgumentError("top_logprobs", "needs logprobs to be true")
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise InvalidArgumentError("max_completion_tokens", "differs from max_tokens, its older name")

    def fields(self) -> SamplingFields:
        max_tokens = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return self.sampling_fields(max_tokens, (self.top_logprobs or 0) if self.logprobs else None)

    def field_name(self, name: str) -> str:
        """The client's name for a sampling field."""
        if name == "max_tokens" and self.max_completion_tokens is not None:
            return "max_completion_tokens"
        return "top_logprobs" if name == "logprobs" else name

    def chat_messages(self) -> list[Message]:
        if not self.messages:
            raise InvalidArgumentError("messages", "must not be empty")
        return [_message(message, f"messages[{index}]") for index, message in enumerate(self.messages)]


class CompletionBody(GenerationBody):
    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = None
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None

    unsupported = ("echo", "suffix")

    def check(self) -> None:
        super().check()
        if self.best_of not in (None, self.num_choices):
            raise InvalidArgumentError("best_of", "is only supported where it equals n")
        if len(self.prompts()) * self.num_choices > MAX_CHOICES:
            raise InvalidArgumentError("prompt", f"prompts times n must be at most {MAX_CHOICES}")

    def fields(self) -> SamplingFields:
        return self.sampling_fields(self.max_tokens, self.logprobs)

    def prompts(self) -> list[str | list[int]]:
        """One or more, each a text or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise InvalidArgumentError("prompt", "must not be empty")
        if isinstance(self.prompt[0], int):
            return [[token_id for token_id in self.prompt if isinstance(token_id, int)]]
        return [prompt for prompt in self.prompt if not isinstance(prompt, int)]


class TokenizeBody(Body):
    model: str | None = None
    text: str | None = None
    prompt: str | None = None  # another name for `text`
    add_special_tokens: bool | None = None


class DetokenizeBody(Body):
    model: str | None = None
    token_ids: list[int]
    skip_special_tokens: bool | None = None


def _logit_bias(bias: dict[str, float] | None) -> dict[int, float]:
    try:
        return {int(token_id): value for token_id, value in (bias or {}).items()}
    except ValueError as error:
        raise InvalidArgumentError("logit_bias", "keys must be token ids") from error


def _message(message: dict[str, object], where: str) -> Message:
    for key, value in message.items():
        if key not in ("role", "content", "name") and value:
            raise InvalidArgumentError(f"{where}.{key}", "is not supported")
    role = message.get("role")
    if not isinstance(role, str):
        raise InvalidArgumentError(f"{where}.role", "must be a string")
    return {"role": chat_role(role, f"{where}.role"), "content": _content(message.get("content"), f"{where}.content")}


def _content(content: object, where: str) -> str:
    """A string, or text parts, which are joined by line breaks."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidArgumentError(where, "must be a string or a list of text parts")
    texts = []
    for index, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text":
            raise InvalidArgumentError(f"{where}[{index}].type", 'only parts of type "text" are supported')
        text = part.get("text")
        if not isinstance(text, str):
            raise InvalidArgumentError(f"{where}[{index}].text", "must be a string")
        texts.append(text)
    return "\n".join(texts)


async def read_body(request: Request) -> bytes:
    """Raises `BodyTooLargeError` as soon as it is known, so that a huge body is not read to its end."""
    declared = request.headers.get("content-length", "0")
    chunks: list[bytes] = []
    size = int(declared) if declared.isdecimal() else 0
    if size <= MAX_BODY_BYTES:
        size = 0
        async for chunk in request.stream():
            size += len(chunk)
            chunks.append(chunk)
            if size > MAX_BODY_BYTES:
                break
    if size > MAX_BODY_BYTES:
        raise BodyTooLargeError(f"the body has more than {MAX_BODY_BYTES} bytes")
    return b"".join(chunks)


def parse(body_class: type[BodyT], data: bytes) -> BodyT:
    """Raises `InvalidArgumentError` with the field that is unknown, missing or of the wrong type."""
    try:
        return body_class.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
    if first["type"] == "json_invalid":
        if field := _field_of_bad_text(data):
            raise InvalidArgumentError(field, "is not valid UTF-8")
        raise InvalidArgumentError("", f"the body is not valid JSON: {first['msg']}")
    if not first["loc"]:
        raise InvalidArgumentError("", "the body must be a JSON object")
    field = str(first["loc"][0])
    if first["type"] == "extra_forbidden":
        raise InvalidArgumentError(field, "is not a known field")
    if first["type"] == "missing":
        raise InvalidArgumentError(field, "is required")
    raise InvalidArgumentError(field, f"has the wrong type: {first['msg']}")


_NO_CHARACTER = re.compile("[\ud800-\udfff]")


def _field_of_bad_text(data: bytes) -> str:
    """The top-level field whose text is not UTF-8, or holds half of a surrogate pair; empty where that is not it."""
    try:
        body = json.loads(data.decode(errors="surrogateescape"))
    except (ValueError, RecursionError):
        return ""
    if not isinstance(body, dict):
        return ""
    for key, value in body.items():
        if _NO_CHARACTER.search(json.dumps(value, ensure_ascii=False)):
            return str(key)
    return ""
