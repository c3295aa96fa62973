"""Tool calls that a model makes by itself, in its own form, with arguments valid under the tools' schemas (`strict`).

The answer is free text. As soon as the model opens a call, its text is held to the form of a call until it closes it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from common.errors import InvalidArgumentError
from common.guided import Guided
from router.text.conversation import Json, Tools
from router.text.forced_calls import closed_schema
from router.text.response_templates import CallShape, Template, call_shape, reasoning_marks


class StrictCalls:
    """Makes the form of answers with strict tool calls, for one model."""

    def __init__(self, template: Template, special: Mapping[str, int]) -> None:
        """`template`: of the model's answers. `special`: ids of special tokens by their text; free text has none."""
        self._shape = call_shape(template)
        self._marks = reasoning_marks(template)
        self._special = special

    def guide(self, tools: Tools) -> Guided | None:
        """The form of an answer in which the model may call `tools`; None if none of them is strict. Arguments of those
        that are not are any object. Raises `InvalidArgumentError`."""
        strict = next((index for index, tool in enumerate(tools.shown) if tool.strict), None)
        if strict is None:
            return None
        try:
            return self._guide(tools)
        except ValueError as error:
            reason = f"is only supported if tool_choice forces a call: {error}"
            raise InvalidArgumentError(f"tools[{strict}].strict", reason) from error

    def _guide(self, tools: Tools) -> Guided:
        if hidden := [mark for mark in self._marks if mark in self._special]:
            raise ValueError(f"{hidden[0]!r} is a special token of this model, and free text has none")
        schemas = {tool.name: closed_schema(tool) if tool.strict else {"type": "object"} for tool in tools.shown}
        match self._shape:
            case CallShape.HERMES:
                tags = [self._hermes(name, schema) for name, schema in schemas.items()]
            case CallShape.MISTRAL:
                tags = [self._mistral(name, schema) for name, schema in schemas.items()]
            case CallShape.MISTRAL_LIST:
                tags = [self._mistral_list(schemas, parallel=tools.parallel)]
            case _:
                raise ValueError("in what this model writes, no mark tells where a call begins that is JSON")
        format_ = {
            "type": "triggered_tags",
            "triggers": ["<tool_call>"] if isinstance(tags[0]["begin"], str) else [],
            "tags": tags,
            "stop_after_first": not tools.parallel,
        }
        return Guided(structural_tag=json.dumps({"type": "structural_tag", "format": format_}))

    def _hermes(self, name: str, schema: Json) -> Json:
        before, after = f'\n{{"name": "{name}", "arguments": ', "}\n"
        if "<tool_call>" not in self._special:
            return {"begin": "<tool_call>" + before, "content": _json(schema), "end": f"{after}</tool_call>"}
        content = _sequence(_const(before), _json(schema), _const(after))
        return {"begin": self._token("<tool_call>"), "content": content, "end": self._token("</tool_call>")}

    def _mistral(self, name: str, schema: Json) -> Json:
        content = _sequence(_const(name), self._token("[ARGS]"), _json(schema))
        return {"begin": self._token("[TOOL_CALLS]"), "content": content, "end": ""}

    def _mistral_list(self, schemas: Mapping[str, Json], *, parallel: bool) -> Json:
        calls = {
            "type": "tags_with_separator",
            "tags": [
                {"begin": f'{{"name": "{name}", "arguments": ', "content": _json(schema), "end": "}"}
                for name, schema in schemas.items()
            ],
            "separator": ", ",
            "at_least_one": True,
            "stop_after_first": not parallel,
        }
        opening = {"type": "or", "elements": [_const("["), _const(" [")]}
        return {
            "begin": self._token("[TOOL_CALLS]"),
            "content": _sequence(opening, calls, _const("]")),
            "end": "",
        }

    def _token(self, text: str) -> Json:
        if text not in self._special:
            raise ValueError(f"{text!r} is no special token of this model")
        return {"type": "token", "token": self._special[text]}


def _json(schema: Json) -> Json:
    return {"type": "json_schema", "json_schema": schema}


def _const(text: str) -> Json:
    return {"type": "const_string", "value": text}


def _sequence(*elements: Json) -> Json:
    return {"type": "sequence", "elements": elements}
