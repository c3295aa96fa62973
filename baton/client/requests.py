"""Requests of `baton.v1` from what callers of a client give. Shared by the client and its asyncio twin."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, TypeVar, cast

import msgspec
from google.protobuf.message import Message as Proto

from baton.client.messages import Message, Tool, ToolCallDelta
from baton.client.report import Chunk, Embeddings, Prefix, PrefixOnWorker, Usage
from common.cache_hints import MAX_RETAIN_S, Retain, check_retain
from common.choices import AnswerOptions, ChoiceOptions
from common.errors import InvalidArgumentError
from common.sampling import SamplingOptions
from common.targets import LatencyTargets, check_targets
from protos.baton.v1 import embed_pb2, inference_pb2, types_pb2
from protos.convert import token_of
from protos.messages import value_of

MessageT = TypeVar("MessageT", bound=Proto)

Messages = str | Sequence[tuple[str, str] | Message]
"""One question, or a conversation: (role, content) pairs and messages."""

_MODES = {
    "auto": inference_pb2.ToolChoice.MODE_AUTO,
    "none": inference_pb2.ToolChoice.MODE_NONE,
    "required": inference_pb2.ToolChoice.MODE_REQUIRED,
}
_POOLINGS = {"last": embed_pb2.POOLING_LAST, "mean": embed_pb2.POOLING_MEAN}


def call_hints(session: str, *, explain: bool) -> tuple[tuple[str, str], ...]:
    """What goes beside a request, as metadata. Raises `InvalidArgumentError`."""
    if not (session.isascii() and session.isprintable()):
        raise InvalidArgumentError("session", "is of printable ASCII")
    hints = (("x-session-id", session.strip()), ("x-baton-explain", "true" if explain else ""))
    return tuple((name, value) for name, value in hints if value)


def sampling_options(options: AnswerOptions) -> SamplingOptions:
    """The options that are sampling parameters, or that nobody knows."""
    left = {name: value for name, value in options.items() if name not in ChoiceOptions.__annotations__}
    return cast("SamplingOptions", left)


def choices_message(options: AnswerOptions) -> inference_pb2.Choices | None:
    """None if one answer is all that is asked for, whatever else."""
    given: dict[str, Any] = {name: options[name] for name in ChoiceOptions.__annotations__ if name in options}  # type: ignore[literal-required]
    return _made(inference_pb2.Choices, given) if given else None


def num_answers(choices: inference_pb2.Choices) -> int:
    return max(choices.n, 1)  # a router refuses any other number


def sampling_message(options: SamplingOptions) -> types_pb2.SamplingParams:
    return _made(types_pb2.SamplingParams, {name: _plain(value) for name, value in options.items()})


def _made(kind: type[MessageT], given: dict[str, Any]) -> MessageT:
    try:
        return kind(**given)
    except (TypeError, ValueError) as error:  # a wrong type, or an integer beyond the field's width
        for name, value in given.items():
            if name not in kind.DESCRIPTOR.fields_by_name:
                raise InvalidArgumentError(name, "is not a known parameter") from error
            try:
                kind(**{name: value})
            except (TypeError, ValueError) as cause:
                raise InvalidArgumentError(name, f"{value!r} is no value for it: {cause}") from error
        raise


def _plain(value: object) -> object:
    """The value with mappings in place of dataclasses, since messages are made from mappings."""
    if dataclasses.is_dataclass(value):
        return msgspec.to_builtins(value, builtin_types=(bytes,))
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


def retain_message(retain: Retain | None) -> types_pb2.Retain | None:
    """Raises `InvalidArgumentError`."""
    if retain is None:
        return None
    check_retain(retain, MAX_RETAIN_S)
    return types_pb2.Retain(seconds=retain.seconds, num_tokens=retain.num_tokens)


def targets_message(slo: LatencyTargets | None) -> types_pb2.LatencyTargets | None:
    """Raises `InvalidArgumentError`."""
    if slo is None:
        return None
    check_targets(slo)
    return types_pb2.LatencyTargets(ttft_ms=slo.ttft_ms, tpot_ms=slo.tpot_ms)


def chat_messages(messages: Messages) -> list[inference_pb2.ChatMessage]:
    if isinstance(messages, str):
        messages = [("user", messages)]
    return [_chat_message(message) for message in messages]


def _chat_message(message: tuple[str, str] | Message) -> inference_pb2.ChatMessage:
    if not isinstance(message, Message):
        role, content = message
        return inference_pb2.ChatMessage(role=role, content=content)
    return inference_pb2.ChatMessage(
        role=message.role,
        content=message.content,
        tool_calls=[
            inference_pb2.ToolCall(id=call.id, name=call.name, arguments=call.arguments) for call in message.tool_calls
        ],
        tool_call_id=message.tool_call_id,
        name=message.name,
        reasoning_content=message.reasoning,
    )


def tool_messages(tools: Sequence[Tool]) -> list[inference_pb2.Tool]:
    return [
        inference_pb2.Tool(
            name=tool.name,
            description=tool.description or None,
            parameters="" if tool.parameters is None else json.dumps(tool.parameters),
            strict=tool.strict,
        )
        for tool in tools
    ]


def tool_choice_message(choice: str, allowed: Sequence[str] = ()) -> inference_pb2.ToolChoice:
    """`choice`: auto, none, required, or a tool's name. `allowed`: the tools that may be called; empty: all."""
    if choice in _MODES:
        return inference_pb2.ToolChoice(mode=_MODES[choice], allowed=allowed)
    return inference_pb2.ToolChoice(name=choice, allowed=allowed)


def tokenize_message(
    text: str,
    messages: Messages,
    tools: Sequence[Tool],
    options: Mapping[str, object] | None,
    *,
    add_special_tokens: bool | None,
    add_generation_prompt: bool | None,
    continue_final_message: bool,
    chat_template: str,
    model: str,
) -> inference_pb2.TokenizeRequest:
    return inference_pb2.TokenizeRequest(
        model=model,
        text=text,
        add_special_tokens=add_special_tokens,
        messages=chat_messages(messages),
        tools=tool_messages(tools),
        chat_template_kwargs=template_options(options),
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        chat_template=chat_template,
    )


def template_options(options: Mapping[str, object] | None) -> str:
    return "" if options is None else json.dumps(options)


class PrefixOptions(TypedDict, total=False):
    """Which prompt is meant: one of `prompt` and `messages`, as requests have them."""

    prompt: str | Sequence[int]
    messages: Messages
    tools: Sequence[Tool]
    chat_template_kwargs: Mapping[str, object] | None
    chat_template: str
    add_special_tokens: bool  # to a prompt that is text; True
    num_tokens: int  # so many of its first tokens; 0: all
    cache_salt: str
    model: str


def prefix_message(options: PrefixOptions) -> inference_pb2.Prefix:
    prompt, messages = options.get("prompt", ""), options.get("messages", ())
    return inference_pb2.Prefix(
        model=options.get("model", ""),
        prompt=prompt if isinstance(prompt, str) else "",
        prompt_token_ids=() if isinstance(prompt, str) else prompt,
        messages=chat_messages(messages),
        tools=tool_messages(options.get("tools", ())),
        chat_template_kwargs=template_options(options.get("chat_template_kwargs")),
        chat_template=options.get("chat_template", ""),
        cache_salt=options.get("cache_salt", ""),
        num_tokens=options.get("num_tokens", 0),
        add_special_tokens=options.get("add_special_tokens"),
    )


def prefix_of(message: inference_pb2.PrefixResponse) -> Prefix:
    return Prefix(
        message.num_tokens,
        message.num_blocks,
        tuple(
            PrefixOnWorker(one.address, one.num_device_blocks, one.num_host_blocks, one.num_stored_blocks, one.error)
            for one in message.workers
        ),
    )


def embed_message(
    inputs: Sequence[str | Sequence[int]],
    *,
    pooling: str,
    dimensions: int,
    normalize: bool,
    add_special_tokens: bool,
    model: str,
    request_id: str,
    cache_salt: str,
) -> inference_pb2.EmbedRequest:
    if pooling not in _POOLINGS:
        raise InvalidArgumentError("pooling", f"must be last or mean, not {pooling!r}")
    return inference_pb2.EmbedRequest(
        request_id=request_id,
        model=model,
        inputs=[
            inference_pb2.EmbedInput(text=one) if isinstance(one, str) else inference_pb2.EmbedInput(token_ids=one)
            for one in inputs
        ],
        pooling=_POOLINGS[pooling],
        dimensions=dimensions,
        normalize=normalize,
        add_special_tokens=add_special_tokens,
        cache_salt=cache_salt,
    )


def embeddings_of(message: inference_pb2.EmbedResponse) -> Embeddings:
    return Embeddings((list(one.values) for one in message.embeddings), value_of(message.usage, Usage))


def chunk_of(message: inference_pb2.GenerateResponse) -> Chunk:
    return Chunk(
        message.text,
        tuple(message.token_ids),
        tuple(map(token_of, message.logprobs)),
        message.reasoning,
        tuple(ToolCallDelta(call.index, call.id, call.name, call.arguments) for call in message.tool_calls),
        tuple(map(token_of, message.prompt_logprobs)),
        message.index,
    )
