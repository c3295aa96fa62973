"""Bodies of REST requests. Types are strict, and a field that is neither supported nor harmless is refused by name.

Decoding ends at the first error, and builds nothing for values that are only looked at: a body costs no more than what
it is read into. What is only a matter of range is left to `common.validation`, which gRPC shares.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, TypeVar, cast

import msgspec
from msgspec import UNSET, Raw

from common.choices import Choices
from common.errors import InvalidArgumentError
from common.sampling import Parameter, json_schemas, parameters
from router.api.rest.body_types import Body, Given, RetainBody
from router.api.rest.guided import GuidedFields
from router.api.rest.tools import FunctionTool, NamedTool, ToolCall, calls_of, chat_tools
from router.serving.conversation import (
    Conversation,
    Json,
    Tools,
    check_effort,
    check_options,
    make_message,
    named_results,
)

MAX_CHOICES = 128
MAX_SEARCHED_BYTES = 64 * 2**10  # of a body that is not valid, for the field that is to blame

BodyT = TypeVar("BodyT", bound="Body")
JsonSchema = dict[str, Any]


class StreamOptions(Body, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # as vLLM's clients ask for it: usage so far in every chunk
    include_obfuscation: Given = UNSET  # of no use: without it, what a network shows of lengths


class GenerationBody(GuidedFields, kw_only=True):
    """What chat and text completion have in common, beside the sampling parameters (`with_sampling`)."""

    model: str | None = None
    n: int | None = None
    use_beam_search: bool | None = None  # this and its options as vLLM's clients ask for them; n is the width
    length_penalty: float | None = None
    early_stopping: bool | None = None
    prompt_logprobs: int | None = None  # as vLLM's clients ask for them
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    # Baton's own, by the names that they have in gRPC.
    cache_salt: str | None = None
    retain: RetainBody | None = None
    priority: int | None = None
    request_id: str | None = None
    add_special_tokens: bool | None = None

    # OpenAI's: they name a session, of which requests should go to one worker.
    prompt_cache_key: Given = UNSET
    user: Given = UNSET

    # OpenAI's: notes for its own records, and for whom it stores answers or has tiers of service.
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    store: bool | None = None
    service_tier: str | None = None
    prompt_cache_retention: Given = UNSET
    prompt_cache_options: Given = UNSET

    unsupported: ClassVar[tuple[str, ...]] = ()

    def check(self) -> None:
        """Raises `InvalidArgumentError` for what is well formed and still cannot be done."""
        if self.store:
            raise InvalidArgumentError("store", "is not supported: nothing is stored")
        check_service_tier(self.service_tier)
        for name in self.unsupported:
            if asks(getattr(self, name)):
                raise InvalidArgumentError(name, "is not supported")
        self.choices.check()
        if self.use_beam_search and self.stream:
            raise InvalidArgumentError("stream", "is not for beam search: its answers are known when it ends")
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidArgumentError("prompt_logprobs", "is not for streams, as chunks have no place for them")
        if self.stream_options is not None and not self.stream:
            raise InvalidArgumentError("stream_options", "is only allowed with stream")
        for name, alias in _ALIASES:
            values = (getattr(self, name), getattr(self, alias))
            if None not in values and values[0] != values[1]:
                raise InvalidArgumentError(alias, f"differs from {name}, another name of it")
        self.guided_text()

    def session(self) -> str:
        """What the body says of it; empty if nothing."""
        return session_of(self)

    @property
    def choices(self) -> Choices:
        return Choices(
            n=1 if self.n is None else self.n,
            use_beam_search=bool(self.use_beam_search),
            length_penalty=1.0 if self.length_penalty is None else self.length_penalty,
            early_stopping=bool(self.early_stopping),
        )

    @property
    def wants_usage_chunk(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def wants_usage_so_far(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

    def sampling(self) -> dict[str, object]:
        """The sampling parameters that the client set."""
        given = {}
        for name, parameter in parameters().items():
            value = getattr(self, self.field_name(name))
            if value is not None:
                given[name] = (value,) if isinstance(value, str) and parameter.is_texts else value
        given.pop("guided", None)
        guided = self.guided_text()
        return given if guided is None else {**given, "guided": guided[1]}

    def field_name(self, name: str) -> str:
        """The client's name for a sampling parameter."""
        if name == "guided" and (guided := self.guided_text()):
            return guided[0]
        for alias in _ALIASES_OF[name]:
            if getattr(self, alias) is not None:
                return alias
        return name


_ALIASES_OF = {name: parameter.rest_aliases for name, parameter in parameters().items()}
_ALIASES = [(name, alias) for name, parameter in parameters().items() for alias in parameter.rest_aliases]


def with_sampling(body: type[BodyT]) -> type[BodyT]:
    """`body` with a field for each sampling parameter that it does not declare itself, and for their other names."""
    fields: list[tuple[str, object, None]] = []
    for name, parameter in parameters().items():
        kind = parameter.type | str | None if parameter.is_texts else parameter.type | None
        fields += [(one, kind, None) for one in _names(name, parameter) if one not in body.__struct_fields__]
    made = msgspec.defstruct(
        body.__name__, fields, bases=(body,), module=body.__module__, kw_only=True, forbid_unknown_fields=True
    )
    return cast("type[BodyT]", made)


def schemas(bodies: Sequence[type[Body]]) -> tuple[tuple[JsonSchema, ...], dict[str, JsonSchema]]:
    """(a reference to each body's JSON Schema, all schemas by name), sampling parameters with help and bounds."""
    reference = "#/components/schemas/{name}"
    references, components = msgspec.json.schema_components(bodies, ref_template=reference)
    sampling, inner = json_schemas(reference.format(name="{model}"))
    for body in bodies:
        properties, own = components[body.__name__]["properties"], getattr(body.__base__, "__struct_fields__", ())
        for name, parameter in parameters().items():
            plain = [{"type": "string"}, {"type": "null"}] if parameter.is_texts else [{"type": "null"}]
            for one in _names(name, parameter):
                if one in properties and one not in own:
                    properties[one] = {"anyOf": [sampling[name], *plain]}
                elif one in properties:
                    properties[one]["anyOf"][0]["description"] = parameter.help
    return references, {**components, **inner}


def _names(name: str, parameter: Parameter) -> tuple[str, ...]:
    return (name, *parameter.rest_aliases)


class ContentPart(Body, kw_only=True):
    type: str = ""
    text: str | None = None

    # Of parts that are no text.
    image_url: Given = UNSET
    input_audio: Given = UNSET
    file: Given = UNSET
    refusal: Given = UNSET

    # Where a prompt's cached part may end: anywhere, here.
    prompt_cache_breakpoint: Given = UNSET
    cache_control: Given = UNSET

    not_text: ClassVar[tuple[str, ...]] = ("image_url", "input_audio", "file", "refusal")


class ChatMessage(Body, kw_only=True):
    type: str | None = None  # "text" from lm-eval, "message" in responses
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    # What answers hold and clients send back; each must be empty.
    refusal: Given = UNSET
    annotations: Given = UNSET
    audio: Given = UNSET
    function_call: Given = UNSET
    reasoning: Given = UNSET

    unsupported: ClassVar[tuple[str, ...]] = ("refusal", "annotations", "audio", "function_call", "reasoning")


@with_sampling
class ChatBody(GenerationBody, kw_only=True):
    messages: list[ChatMessage]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    modalities: list[str] | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: str | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # further variables of the model's template
    functions: Given = UNSET
    function_call: Given = UNSET
    audio: Given = UNSET
    prediction: Given = UNSET
    reasoning_effort: str | None = None
    verbosity: Given = UNSET
    web_search_options: Given = UNSET

    unsupported: ClassVar[tuple[str, ...]] = (
        "functions",
        "audio",
        "prediction",
        "verbosity",
        "web_search_options",
    )

    def check(self) -> None:
        super().check()
        if self.modalities not in (None, [], ["text"]):
            raise InvalidArgumentError("modalities", 'only ["text"] is supported')
        if asks(self.function_call) and bytes(cast("Raw", self.function_call)) not in (b'"none"', b'"auto"'):
            raise InvalidArgumentError("function_call", "is not supported: take tool_choice")
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidArgumentError("top_logprobs", "needs logprobs to be true")

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.logprobs)

    def sampling(self) -> dict[str, object]:
        given = super().sampling()
        given.pop("logprobs", None)
        return {**given, "logprobs": self.top_logprobs or 0} if self.logprobs else given

    def field_name(self, name: str) -> str:
        return "top_logprobs" if name == "logprobs" else super().field_name(name)

    def conversation(self) -> Conversation:
        tools = chat_tools(self.tools or (), self.tool_choice, parallel=self.parallel_tool_calls is not False)
        conversation = conversation_of(self.messages, tools, self.chat_template_kwargs)
        return replace(conversation, effort=check_effort(self.reasoning_effort, "reasoning_effort"))


@with_sampling
class CompletionBody(GenerationBody, kw_only=True):
    prompt: str | list[str | int | list[int]]
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    suffix: str | None = None

    unsupported: ClassVar[tuple[str, ...]] = ("suffix",)

    def check(self) -> None:
        super().check()
        if self.choices.are_compared and self.stream:
            raise InvalidArgumentError("best_of", "must equal n in a stream: only whole answers can be compared")
        if len(self.prompts()) * self.choices.num_candidates > MAX_CHOICES:
            name = "best_of" if self.best_of else "n"
            raise InvalidArgumentError("prompt", f"prompts times {name} must be at most {MAX_CHOICES}")
        if self.is_only_echo and self.min_tokens:
            raise InvalidArgumentError("min_tokens", f"{self.min_tokens} is more than max_tokens, 0")
        if self.echo and None not in (self.logprobs, self.prompt_logprobs) and self.logprobs != self.prompt_logprobs:
            raise InvalidArgumentError("prompt_logprobs", "must equal logprobs, which echo gives of the prompt, too")

    @property
    def choices(self) -> Choices:
        return replace(super().choices, best_of=self.best_of)

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None

    @property
    def is_only_echo(self) -> bool:
        """The prompt is the whole answer: what harnesses ask for that want its logprobs. Nothing but a token that is
        computed gives them, so workers are asked for one."""
        return bool(self.echo) and self.max_tokens == 0

    def sampling(self) -> dict[str, object]:
        given = super().sampling()
        if self.is_only_echo:
            given["max_tokens"] = 1
        if self.choices.are_compared:
            given.setdefault("logprobs", 0)  # they decide which are the best
        return given

    def field_name(self, name: str) -> str:
        is_echoed = bool(self.echo) and name == "prompt_logprobs" and self.prompt_logprobs is None
        return super().field_name("logprobs" if is_echoed else name)  # which echo gives of the prompt, too

    def prompts(self) -> list[str | list[int]]:
        """One or more, each a text or token ids."""
        return several(self.prompt, "prompt")


def check_service_tier(given: str | None) -> None:
    if given not in (None, "auto", "default"):
        raise InvalidArgumentError("service_tier", f'must be "auto" or "default", not {given!r}: there is one tier')


def session_of(body: Body) -> str:
    """The session that a body names by OpenAI's fields for it; empty if it names none."""
    for name in ("prompt_cache_key", "user"):
        given = getattr(body, name)
        if asks(given):
            try:
                return msgspec.json.decode(given, type=str)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise InvalidArgumentError(name, "must be a string") from error
    return ""


def several(given: str | list[str | int | list[int]], name: str) -> list[str | list[int]]:
    """One or more, each a text or token ids."""
    if isinstance(given, str):
        return [given]
    if not given:
        raise InvalidArgumentError(name, "must not be empty")
    kind = type(given[0])
    if any(type(item) is not kind for item in given):
        raise InvalidArgumentError(name, "must be a text, texts, token ids or lists of token ids, not a mixture")
    if kind is int:
        return [cast("list[int]", given)]
    return cast("list[str | list[int]]", given)


class TokenizeBody(Body, kw_only=True):
    model: str | None = None
    text: str | None = None
    prompt: str | None = None  # vLLM's name for `text`; the answer then has its name for `token_ids`, too
    add_special_tokens: bool | None = None

    def check(self) -> None:
        if self.text is None and self.prompt is None:
            raise InvalidArgumentError("text", "is required")
        if None not in (self.text, self.prompt):
            raise InvalidArgumentError("prompt", "cannot be together with text, another name of it")


class DetokenizeBody(Body, kw_only=True):
    model: str | None = None
    token_ids: list[int] | None = None
    tokens: list[int] | None = None  # vLLM's name for `token_ids`; the answer then has its name for `text`, too
    skip_special_tokens: bool | None = None

    def check(self) -> None:
        if self.token_ids is None and self.tokens is None:
            raise InvalidArgumentError("token_ids", "is required")
        if None not in (self.token_ids, self.tokens):
            raise InvalidArgumentError("tokens", "cannot be together with token_ids, another name of it")


def asks(value: object) -> bool:
    """Null, false and empty ask for nothing."""
    if isinstance(value, Raw):
        return bytes(value).translate(None, b" \t\r\n") not in (b"null", b"false", b'""', b"[]", b"{}", b"0")
    return value is not UNSET and bool(value)


def conversation_of(given: Sequence[ChatMessage], tools: Tools, options: dict[str, Any] | None) -> Conversation:
    """Raises `InvalidArgumentError`."""
    if not given:
        raise InvalidArgumentError("messages", "must not be empty")
    messages = [_message(message, f"messages[{index}]") for index, message in enumerate(given)]
    check_options(options or {}, "chat_template_kwargs")
    return Conversation(messages=named_results(messages), tools=tools, template_options=options or {})


def _message(message: ChatMessage, where: str) -> Json:
    for name in message.unsupported:
        if asks(getattr(message, name)):
            raise InvalidArgumentError(f"{where}.{name}", "is not supported")
    if message.type not in (None, "text", "message"):
        raise InvalidArgumentError(f"{where}.type", f'must be "text" or "message", not {message.type!r}')
    return make_message(
        where,
        role=message.role,
        content=None if message.content is None else _content(message.content, f"{where}.content"),
        name=message.name,
        calls=calls_of(message.tool_calls or (), where),
        tool_call_id=message.tool_call_id,
        reasoning=message.reasoning_content,
    )


def _content(content: str | list[ContentPart], where: str) -> str:
    """A string, or text parts, which are joined by line breaks."""
    if isinstance(content, str):
        return content
    texts = []
    for index, part in enumerate(content):
        if part.type != "text":
            raise InvalidArgumentError(f"{where}[{index}].type", 'only parts of type "text" are supported')
        if part.text is None:
            raise InvalidArgumentError(f"{where}[{index}].text", "must be a string")
        for name in part.not_text:
            if asks(getattr(part, name)):
                raise InvalidArgumentError(f"{where}[{index}].{name}", 'is not a field of type "text"')
        texts.append(part.text)
    return "\n".join(texts)


_NO_CHARACTER = re.compile("[\ud800-\udfff]")
_NO_NUMBER = re.compile(r"NaN|Infinity")
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`")


def parse(body_class: type[BodyT], data: bytes) -> BodyT:
    """Raises `InvalidArgumentError` with the first field that is unknown, missing or of the wrong type."""
    try:
        return msgspec.json.decode(data, type=body_class)
    except msgspec.ValidationError as error:
        raise _wrong(str(error)) from error
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(_field_of_bad_text(data), "is not valid UTF-8") from error
    except RecursionError as error:
        raise InvalidArgumentError("", "the body is not valid JSON: it is nested too deeply") from error
    except msgspec.DecodeError as error:
        if field := _field_of_bad_text(data):
            raise InvalidArgumentError(field, "is not valid: text must be UTF-8, and numbers finite") from error
        raise InvalidArgumentError("", f"the body is not valid JSON: {error}") from error


def _wrong(message: str) -> InvalidArgumentError:
    """From msgspec's words, which end in the place: ... - at `$.messages[0].role`."""
    reason, _, place = message.replace(" - at `key` in `$", " of a key - at `$").partition(" - at `$")
    path = place.rstrip("`").removeprefix(".").removesuffix("[...]")
    for pattern, said in ((_UNKNOWN, "is not a known field"), (_MISSING, "is required")):
        if match := pattern.fullmatch(reason):
            return InvalidArgumentError(f"{path}.{match[1]}" if path else match[1][:100], said)
    if not path:
        return InvalidArgumentError("", "the body must be a JSON object")
    return InvalidArgumentError(path, f"has the wrong type: {reason}")


def _field_of_bad_text(data: bytes) -> str:
    """The top-level field that holds NaN, infinity, or text that is no Unicode; empty if the body is no JSON object at
    all, or so large that looking for it is too much work."""
    if len(data) > MAX_SEARCHED_BYTES:
        return ""
    try:
        body = json.loads(data.decode(errors="surrogateescape"))
    except (ValueError, RecursionError):
        return ""
    for name, value in body.items() if isinstance(body, dict) else ():
        text = json.dumps(value, ensure_ascii=False)
        if _NO_CHARACTER.search(text) or _NO_NUMBER.search(text):
            return str(name)
    return ""
