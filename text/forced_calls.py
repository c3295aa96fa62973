"""Tool calls that a client forces: the answer is JSON alone, guided by the tools' schemas.

With a named tool it is that tool's arguments. If any tool has to be called, it is a list of calls. Neither depends on
how the model would write a call by itself, so both work with every model whose chat template knows tools.
"""

from __future__ import annotations

from common.guided import Guided, json_text
from text.answer_parts import Pieces, Reading, ToolCallDelta, new_call_id
from text.conversation import Json, Tool, Tools
from text.tool_text import ArgumentsText, ObjectsText

_NOTES = frozenset(
    ["type", "$schema", "$id", "id", "$comment", "$defs", "definitions", "title", "description", "default", "examples"]
)


def forced_guide(tools: Tools) -> Guided:
    """The form of the answer. Requires `tools.is_forced`."""
    if name := _only(tools):
        return Guided(json_schema=json_text(closed_schema(next(tool for tool in tools.tools if tool.name == name))))
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool.name}, "parameters": {"$ref": f"#/$defs/t{number}"}},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for number, tool in enumerate(tools.callable)
    ]
    schema: Json = {"type": "array", "minItems": 1, "items": {"anyOf": calls} if len(calls) > 1 else calls[0]}
    if not tools.parallel:
        schema["maxItems"] = 1
    schema["$defs"] = {
        f"t{number}": _resource(closed_schema(tool), number) for number, tool in enumerate(tools.callable)
    }
    return Guided(json_schema=json_text(schema))


def forced_reading(tools: Tools) -> Reading:
    name = _only(tools)
    return Reading(
        parser=lambda: ForcedParser(name), fresh_parser=lambda: ForcedParser(name), shown_token_ids=frozenset()
    )


def _only(tools: Tools) -> str:
    """The name of the one tool that is called once; empty if the model chooses."""
    tools_left = tools.callable
    return tools.named or (tools_left[0].name if len(tools_left) == 1 and not tools.parallel else "")


def closed_schema(tool: Tool) -> Json:
    """The schema of the arguments. One that asks for nothing means that there are no arguments."""
    schema: Json = {"type": "object", **tool.parameters}
    if any(
        value not in ({}, []) or key == "additionalProperties" for key, value in schema.items() if key not in _NOTES
    ):
        return schema
    return {**schema, "type": "object", "additionalProperties": False}


def _resource(schema: Json, number: int) -> Json:
    """A schema inside another one, whose references lead to where they led before: it has an id."""
    given = schema.get("$id", schema.get("id"))
    id_ = given if isinstance(given, str) and not given.startswith("#") else f"tool:{number}"
    return {"$id": id_, **{key: value for key, value in schema.items() if key not in ("$id", "id")}}


class ForcedParser:
    """Reads one answer. As `answer_parser.AnswerParser`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._text = ArgumentsText(name) if name else ObjectsText()
        self._unshown = ""  # all that came before the first call
        self.num_calls = 0
        self.is_done = self.is_cut = False

    def add(self, text: str) -> Pieces:
        self._text.add(text)
        pieces = Pieces()
        for index, call in enumerate(self._text.calls):
            if index < self.num_calls:
                if arguments := call.take():
                    pieces.add_call(ToolCallDelta(index, arguments=arguments))
            elif call.name and call.is_begun:
                pieces.add_call(ToolCallDelta(index, new_call_id(), call.name, call.take()))
                self.num_calls += 1
        if not self.num_calls:
            self._unshown += text
        return pieces

    def end(self) -> Pieces:
        """A call whose name is known is there, without arguments if they have not begun. Of one without a name nothing
        is shown: a client that forces a call has no use for its beginning as text."""
        pieces = Pieces()
        self.is_cut = self._text.is_open or not self._text.calls
        last = self._text.calls[-1] if self._text.calls else None
        if last is None:
            if not self._unshown.lstrip().startswith("["):
                pieces.add_text(self._unshown)  # no grammar gives such a text, but none may be lost
        elif last.name and self.num_calls < len(self._text.calls):
            pieces.add_call(ToolCallDelta(self.num_calls, new_call_id(), last.name))
            self.num_calls += 1
        return pieces
