"""Tools for models whose chat template has no words for them: a system text lists the tools, and calls and results are
ordinary text in the conversation. Models that were trained on tools at all know this shape, which is Hermes'."""

from __future__ import annotations

import json
from collections.abc import Mapping

from text.conversation import Conversation, Json, Message, Tools

NOTE = "tools: the model's chat template has no form for them; a system text tells of them, and calls are text"


def in_words(conversation: Conversation, *, takes_system: bool) -> list[Json]:
    """The messages of `conversation`, with tools, calls and results as text. `takes_system`: whether the chat template
    writes a system message; if not, the first question begins with the text."""
    messages: list[Json] = []
    after_result = False
    for message in conversation.messages:
        made = _in_words(message)
        if after_result and made["role"] == "user":  # many templates want the roles to alternate
            messages[-1]["content"] += "\n" + made["content"]
        else:
            messages.append(made)
        after_result = message["role"] == "tool" or (after_result and message["role"] == "user")
    if conversation.tools.shown:
        _tell(messages, _instruction(conversation.tools), "system" if takes_system else "user")
    return messages


def _tell(messages: list[Json], text: str, role: str) -> None:
    """Adds the text to the system message, or to the first question; a new message if there is none."""
    first = next((one for one in messages if one["role"] == role), None)
    if first is None:
        messages.insert(0, {"role": role, "content": text})
    elif role == "system":
        first["content"] = f"{first['content']}\n\n{text}" if first["content"] else text
    else:
        first["content"] = f"{text}\n\n{first['content']}"


def _instruction(tools: Tools) -> str:
    listed = "\n".join(_json(tool.as_json()["function"]) for tool in tools.shown)
    many = "Several calls may follow each other." if tools.parallel else "Make one call at a time."
    return (
        "You can call the functions that are listed here, each with the JSON schema of its parameters:\n"
        f"<tools>\n{listed}\n</tools>\n"
        "To call a function, write its name and its arguments as JSON, like this:\n"
        '<tool_call>\n{"name": "function_name", "arguments": {"parameter": "value"}}\n</tool_call>\n'
        f"{many} The result comes in the next message, as <tool_response>. "
        "If no function helps, answer in plain words."
    )


def _in_words(message: Message) -> Json:
    kept = {key: value for key, value in message.items() if key not in ("tool_calls", "tool_call_id")}
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = [_call(call["function"]) for call in message.get("tool_calls", ())]
    texts = [message["content"], *calls] if message["content"] else calls
    return {**kept, "content": "\n".join(texts)} if calls else kept


def _call(function: Mapping[str, object]) -> str:
    """Arguments that are a text are no JSON: they are as the client sent them."""
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else _json(arguments)
    return f'<tool_call>\n{{"name": {_json(function["name"])}, "arguments": {text}}}\n</tool_call>'


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
