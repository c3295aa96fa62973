"""What callers of `LLM` may write for a prompt, a conversation or a tool, the forms of OpenAI and vLLM among them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from baton.client.messages import Message, Tool, ToolCall
from baton.client.requests import Messages
from common.errors import InvalidArgumentError
from text.conversation import joined_parts

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or a mapping with `prompt` or `prompt_token_ids`."""

ChatMessages = Messages | Sequence[Mapping[str, Any]]

_MESSAGE_KEYS = {"role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content", "reasoning"}


def prompts_of(prompts: Prompt | Sequence[Prompt]) -> list[str | list[int]]:
    """One or several. Raises `InvalidArgumentError`."""
    if isinstance(prompts, str | Mapping) or (len(prompts) > 0 and isinstance(prompts[0], int)):
        return [_prompt(cast("Prompt", prompts), "prompts")]
    return [_prompt(one, f"prompts[{index}]") for index, one in enumerate(cast("Sequence[Prompt]", prompts))]


def _prompt(prompt: Prompt, name: str) -> str | list[int]:
    given: object = prompt
    if isinstance(prompt, Mapping):
        if len(prompt) != 1 or not prompt.keys() <= {"prompt", "prompt_token_ids"}:
            raise InvalidArgumentError(name, "must have one of prompt and prompt_token_ids, and nothing else")
        (given,) = prompt.values()
    if isinstance(given, str):
        return given
    if isinstance(given, Sequence) and all(isinstance(token_id, int) for token_id in given):
        return list(given)
    raise InvalidArgumentError(name, f"must be text or token ids, not {str(given)[:100]!r}")


def conversations_of(messages: ChatMessages | Sequence[ChatMessages]) -> list[list[tuple[str, str] | Message]]:
    """One conversation, or a list of several. Raises `InvalidArgumentError`."""
    if isinstance(messages, str):
        return [[("user", messages)]]
    if messages and isinstance(messages[0], list):
        several = cast("Sequence[ChatMessages]", messages)
        return [_conversation(one, f"messages[{index}]") for index, one in enumerate(several)]
    return [_conversation(cast("ChatMessages", messages), "messages")]


def _conversation(messages: ChatMessages, name: str) -> list[tuple[str, str] | Message]:
    return [
        _message(message, f"{name}[{index}]") if isinstance(message, Mapping) else message
        for index, message in enumerate(messages)
        if not isinstance(message, str)
    ]


def _message(given: Mapping[str, Any], name: str) -> Message:
    """One message, from the way in which OpenAI's clients write it."""
    for key in given:
        if key not in _MESSAGE_KEYS:
            raise InvalidArgumentError(f"{name}.{key}", "is not known")
    if None not in (names := (given.get("reasoning"), given.get("reasoning_content"))) and names[0] != names[1]:
        raise InvalidArgumentError(f"{name}.reasoning", "differs from reasoning_content, another name of it")
    try:
        calls = [
            ToolCall(call["id"], call["function"]["name"], call["function"]["arguments"])
            for call in given.get("tool_calls") or ()
        ]
        return Message(
            role=given["role"],
            content=_text(given.get("content")),
            tool_calls=calls,
            tool_call_id=given.get("tool_call_id", ""),
            name=given.get("name") or "",
            reasoning=given.get("reasoning_content") or given.get("reasoning") or "",
        )
    except (KeyError, TypeError) as error:
        raise InvalidArgumentError(name, f"is no message: {error}") from error


def _text(content: object) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = cast("Sequence[Mapping[str, Any]]", content)
    if any(part["type"] != "text" for part in parts):
        raise TypeError("content may have parts of text only")
    return joined_parts(part["text"] for part in parts)


def tools_of(tools: Sequence[Tool | Mapping[str, Any]] | None) -> list[Tool]:
    """Raises `InvalidArgumentError`."""
    return [tool if isinstance(tool, Tool) else _tool(tool, f"tools[{i}]") for i, tool in enumerate(tools or ())]


def _tool(given: Mapping[str, Any], name: str) -> Tool:
    try:
        return Tool(**given["function"])
    except (KeyError, TypeError) as error:
        raise InvalidArgumentError(name, f"is no tool of type function: {error}") from error
