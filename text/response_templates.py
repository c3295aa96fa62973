"""The forms in which models write reasoning and tool calls, as data for transformers' response parser.

A tokenizer may bring its own (`response_template` in tokenizer_config.json). Most published ones do not; for them the
chat template tells, which writes earlier calls of a conversation in the shape that the model was trained on.
"""

from __future__ import annotations

import copy
import re
from enum import Enum
from typing import Any

Template = dict[str, Any]

REASONING_FIELDS = ("reasoning_content", "thinking")  # what templates call it

_THINK: Template = {"open": "<think>", "close": "</think>"}
_BRACKET_THINK: Template = {"open": "[THINK]", "close": "[/THINK]"}
_CONTENT: Template = {"content": "text"}

# Where the answer begins in a prompt that asks for one. Some prompts end with the beginning of its reasoning.
_ANCHOR = "|".join(
    (
        r"<\|im_start\|>assistant\n",
        r"<\|end_header_id\|>\n\n",
        r"\[/INST\]",
        r"\[/TOOL_RESULTS\]",  # Mistral's templates write nothing between a result and the answer to it
        "<\uff5cAssistant\uff5c>",
        r"(?=<think>\s*\Z)",
        r"(?=\[THINK\]\s*\Z)",
    )
)

# <tool_call>{"name": "f", "arguments": {...}}</tool_call>, once for each call: Hermes, Qwen2.5, Qwen3
_HERMES_CALLS: Template = {
    "open_pattern": r"<tool_call>\s*",
    "close_pattern": r"\s*</tool_call>",
    "repeats": True,
    "content": "json",
    "transform": {"type": "function", "function": "{content}"},
}
# <tool_call><function=f><parameter=x>1</parameter></function></tool_call>: Qwen3-Coder, Qwen3.5
_TAGGED_CALLS: Template = {
    "open_pattern": r"<tool_call>\s*<function=(?P<name>[^>\n]+)>",
    "close_pattern": r"</function>\s*</tool_call>",
    "repeats": True,
    "content": "xml-inline",
    "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"},
    "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
}
# {"name": "f", "parameters": {...}} and nothing else: Llama 3.1 to 3.3; some write <|python_tag|> before it
_LLAMA_CALLS: Template = {
    "open_pattern": r'<\|python_tag\|>\s*|\A\s*(?=\{\s*"(?:name|type)"\s*:)',
    "repeats": True,
    "content": "json",
    "transform": {"type": "function", "function": "{content}"},
}
# [TOOL_CALLS][{"name": "f", "arguments": {...}}, ...]: Mistral's tokenizers up to version 7
_MISTRAL_LIST: Template = {
    "open_pattern": r"\[TOOL_CALLS\]\s*(?=\[)",
    "repeats": True,
    "content": "json",
    "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}},
    "transform_each": True,
}
# [TOOL_CALLS]f[ARGS]{...}, once for each call: from version 11 on
_MISTRAL_CALLS: Template = {
    "open_pattern": r"\[TOOL_CALLS\]\s*(?P<name>[A-Za-z0-9_-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\]|(?=\{))",
    "close_pattern": r"\s*(?=\[TOOL_CALLS\])",
    "repeats": True,
    "content": "json",
    "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
}


class CallShape(Enum):
    """The shapes of calls that are known."""

    HERMES = "hermes"
    MISTRAL = "mistral"
    MISTRAL_LIST = "mistral list"
    TAGGED = "tagged"
    LLAMA = "llama"


_SHAPES = (
    (CallShape.HERMES, _HERMES_CALLS),
    (CallShape.MISTRAL, _MISTRAL_CALLS),
    (CallShape.MISTRAL_LIST, _MISTRAL_LIST),
    (CallShape.TAGGED, _TAGGED_CALLS),
    (CallShape.LLAMA, _LLAMA_CALLS),
)


def call_shape(template: Template) -> CallShape | None:
    """None if calls are in another shape, or in one that came with the model."""
    calls = template["fields"].get("tool_calls")
    return next((shape for shape, known in _SHAPES if calls == known), None)


def reasoning_marks(template: Template) -> tuple[str, str] | None:
    """What opens and what closes the model's reasoning; None if that is no fixed text."""
    for name in REASONING_FIELDS:
        field = template["fields"].get(name)
        if field is not None and isinstance(field.get("open"), str) and isinstance(field.get("close"), str):
            return field["open"], field["close"]
    return None


def response_template(own: object, chat_template: str) -> Template | None:
    """`own` is the tokenizer's `response_template`, if it has one. None if answers of the model are plain text, as far
    as anybody says."""
    if isinstance(own, dict):
        return copy.deepcopy(own)
    fields: Template = {}
    if "<think>" in chat_template:
        fields["reasoning_content"] = _THINK
    elif "[THINK]" in chat_template:
        fields["reasoning_content"] = _BRACKET_THINK
    if calls := _calls(chat_template):
        fields["tool_calls"] = calls
    if not fields:
        return None
    return copy.deepcopy({"start_anchor_pattern": _ANCHOR, "fields": {**fields, "content": _CONTENT}})


def generic_template(template: Template | None) -> Template:
    """`template`, of a model's answers, with calls in the shape that `generic_tools` tells of."""
    made = copy.deepcopy(template or {"start_anchor_pattern": _ANCHOR, "fields": {"content": _CONTENT}})
    fields = {name: field for name, field in made["fields"].items() if name != "tool_calls"}
    return {**made, "fields": {"tool_calls": copy.deepcopy(_HERMES_CALLS), **fields}}


def _calls(chat_template: str) -> Template | None:
    """The shape of a call; None if the chat template knows no tools, or writes calls in a shape that is not known."""
    if "<tool_call>" in chat_template:
        return _TAGGED_CALLS if "<function=" in chat_template else _HERMES_CALLS
    if "[TOOL_CALLS]" in chat_template:
        is_list = "[ARGS]" not in chat_template and re.search(r"\[TOOL_CALLS\] ?\[", chat_template)
        return _MISTRAL_LIST if is_list else _MISTRAL_CALLS
    if "<|start_header_id|>" in chat_template and "tools" in chat_template:
        return _LLAMA_CALLS
    return None
