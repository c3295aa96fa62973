"""From the messages of a gRPC `ChatRequest` to a conversation."""

from __future__ import annotations

import json
from typing import Any

from common.errors import InvalidArgumentError
from protos.baton.v1 import inference_pb2
from text.conversation import (
    Call,
    CallIds,
    Conversation,
    Json,
    Tool,
    Tools,
    ValueCount,
    check_continued,
    check_num_calls,
    check_num_tools,
    check_options,
    make_message,
    make_tools,
    named_results,
)

_MODES = {
    inference_pb2.ToolChoice.MODE_UNSPECIFIED: "auto",
    inference_pb2.ToolChoice.MODE_AUTO: "auto",
    inference_pb2.ToolChoice.MODE_NONE: "none",
    inference_pb2.ToolChoice.MODE_REQUIRED: "required",
}


def conversation(request: inference_pb2.ChatRequest) -> Conversation:
    """Raises `InvalidArgumentError`."""
    values, ids = ValueCount(), CallIds()
    messages = [_message(message, f"messages[{index}]", values, ids) for index, message in enumerate(request.messages)]
    options = _object(request.chat_template_kwargs, "chat_template_kwargs") or {}
    check_options(options, "chat_template_kwargs")
    asks = request.add_generation_prompt if request.HasField("add_generation_prompt") else None
    if asks and request.continue_final_message:
        raise InvalidArgumentError("continue_final_message", "cannot be together with add_generation_prompt")
    if request.continue_final_message:
        check_continued(messages, "continue_final_message")
    return Conversation(
        messages=named_results(messages),
        tools=_tools(request),
        template_options=options,
        asks_answer=asks is not False,
        continues_last=request.continue_final_message,
        chat_template=request.chat_template,
    )


def _message(message: inference_pb2.ChatMessage, where: str, values: ValueCount, ids: CallIds) -> Json:
    check_num_calls(len(message.tool_calls), f"{where}.tool_calls")
    calls = [Call(call_id=call.id, name=call.name, arguments=call.arguments) for call in message.tool_calls]
    return make_message(
        where,
        role=message.role,
        content=message.content,
        name=message.name,
        calls=calls,
        tool_call_id=message.tool_call_id,
        reasoning=message.reasoning_content,
        values=values,
        ids=ids,
    )


def _tools(request: inference_pb2.ChatRequest) -> Tools:
    choice = request.tool_choice
    if choice.mode not in _MODES:
        raise InvalidArgumentError("tool_choice.mode", f"{choice.mode} is not known")
    if choice.WhichOneof("choice") == "name" and not choice.name:
        raise InvalidArgumentError("tool_choice.name", "must not be empty")
    if choice.allowed and (choice.name or choice.mode == inference_pb2.ToolChoice.MODE_NONE):
        raise InvalidArgumentError("tool_choice.allowed", "is only for the modes auto and required")
    check_num_tools(len(request.tools), "tools")
    return make_tools(
        [_tool(tool, f"tools[{index}]") for index, tool in enumerate(request.tools)],
        "tools",
        choice="required" if choice.name else _MODES[choice.mode],
        named=choice.name,
        allowed=list(choice.allowed) or None,
        allowed_field="tool_choice.allowed",
        parallel=request.parallel_tool_calls if request.HasField("parallel_tool_calls") else True,
    )


def _tool(tool: inference_pb2.Tool, where: str) -> Tool:
    parameters = _object(tool.parameters, f"{where}.parameters")
    given: dict[str, Any] = {} if parameters is None else {"parameters": parameters}
    description = tool.description if tool.HasField("description") else None
    return Tool(name=tool.name, description=description, strict=tool.strict, **given)


def _object(text: str, where: str) -> Json | None:
    """None if there is no text."""
    if not text:
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(where, f"is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidArgumentError(where, "must be the JSON text of an object")
    return value
