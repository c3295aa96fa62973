"""Tool calls that a model makes by itself, in its own form.

With `strict`, the answer is free text. As soon as the model opens a call, its text is held to the form of a call, with
arguments valid under the tools' schemas, until it closes it. Beside a form that the client gives, the answer is calls
alone, or text of that form.
"""

from __future__ import annotations

from collections.abc import Mapping

from common.errors import InvalidArgumentError
from text.conversation import Json, Tools
from text.forced_calls import closed_schema
from text.response_templates import CallShape, Template, call_shape
from text.thought import mark


class StrictCalls:
    """Makes the form of answers with tool calls, for one model, as a format of structural tags."""

    def __init__(self, template: Template, special: Mapping[str, int], tokens: Mapping[str, int]) -> None:
        """`template`: of the model's answers. `special`: ids of special tokens by their text; free text has none.
        `tokens`: see `mark`."""
        self._shape = call_shape(template)
        self._special = special
        self._tokens = tokens

    def format(self, tools: Tools) -> Json | None:
        """The form of an answer in which the model may call `tools`; None if none of them is strict, and all may be
        called. Arguments of those that are not strict are any object. Raises `InvalidArgumentError`."""
        strict = next((i for i, tool in enumerate(tools.shown) if tool.strict and tools.may_call(tool.name)), None)
        if strict is None and tools.allowed is None:
            return None
        try:
            if self._shape is CallShape.TAGGED and strict is not None:
                raise ValueError(_NO_MARK)
            tags = self._tags(tools)
        except ValueError as error:
            if strict is None:
                return None  # a call of another tool is no call to the parser
            reason = f"is only supported if tool_choice forces a call: {error}"
            raise InvalidArgumentError(f"{tools.place(strict)}.strict", reason) from error
        return {
            "type": "triggered_tags",
            "triggers": [],
            "tags": tags,
            "stop_after_first": not tools.parallel,
        }

    def calls(self, tools: Tools) -> Json:
        """The form of an answer that is nothing but calls. Raises `ValueError` if the form of calls is not known."""
        if self._shape is CallShape.LLAMA:
            return {"type": "or", "elements": [_llama(tool.name) for tool in tools.callable]}
        return {
            "type": "tags_with_separator",
            "tags": self._tags(tools),
            "separator": "" if self._shape is CallShape.MISTRAL else "\n",
            "at_least_one": True,
            "stop_after_first": self._shape is CallShape.MISTRAL_LIST or not tools.parallel,
        }

    def openings(self, tools: Tools) -> tuple[str, ...]:
        """With which texts an answer begins that is of the form `calls`."""
        match self._shape:
            case CallShape.HERMES | CallShape.TAGGED:
                return ("<tool_call>",)
            case CallShape.LLAMA:
                return tuple(_llama_opening(tool.name) for tool in tools.callable)
        return ("[TOOL_CALLS]",)

    def _tags(self, tools: Tools) -> list[Json]:
        schemas = {tool.name: closed_schema(tool) if tool.strict else {"type": "object"} for tool in tools.callable}
        match self._shape:
            case CallShape.HERMES:
                return [self._hermes(name, schema) for name, schema in schemas.items()]
            case CallShape.MISTRAL:
                return [self._mistral(name, schema) for name, schema in schemas.items()]
            case CallShape.MISTRAL_LIST:
                return [self._mistral_list(schemas, parallel=tools.parallel)]
            case CallShape.TAGGED:
                return [self._tagged(name) for name in schemas]
        raise ValueError(_NO_MARK)

    def _hermes(self, name: str, schema: Json) -> Json:
        content = _sequence(_const(f'\n{{"name": "{name}", "arguments": '), _json(schema), _const("}\n"))
        return {"begin": self._mark("<tool_call>"), "content": content, "end": self._mark("</tool_call>")}

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

    def _tagged(self, name: str) -> Json:
        """Arguments are no JSON, so they are free text."""
        rest = {"type": "text_until", "end": self._mark("</tool_call>")}
        content = _sequence(_const(f"\n<function={name}>\n"), rest)
        return {"begin": self._mark("<tool_call>"), "content": content, "end": ""}

    def _mark(self, text: str) -> Json:
        return mark(text, self._tokens)

    def _token(self, text: str) -> Json:
        if text not in self._special:
            raise ValueError(f"{text!r} is no special token of this model")
        return {"type": "token", "token": self._special[text]}


_NO_MARK = "in what this model writes, no mark tells where a call begins that is JSON"


def _llama_opening(name: str) -> str:
    return f'{{"name": "{name}", "parameters": '


def _llama(name: str) -> Json:
    """A schema, and no text around another: a form in JSON may begin with the same bracket."""
    call = {
        "type": "object",
        "properties": {"name": {"const": name}, "parameters": {"type": "object"}},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }
    return _json(call)


def _json(schema: Json) -> Json:
    return {"type": "json_schema", "json_schema": schema}


def _const(text: str) -> Json:
    return {"type": "const_string", "value": text}


def _sequence(*elements: Json) -> Json:
    return {"type": "sequence", "elements": elements}
