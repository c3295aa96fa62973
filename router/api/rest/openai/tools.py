"""Tools and calls of tools in chat bodies, in OpenAI's shape, and in answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import UNSET

from common.errors import InvalidArgumentError
from router.api.rest.openai.body_types import Body, GivenRaw, is_given
from text.answer_parts import ToolCallDelta
from text.conversation import Call, Tool, Tools, check_num_tools, make_tools

JsonObject = dict[str, object]


class Function(Body, kw_only=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def tool(self) -> Tool:
        given: dict[str, Any] = {} if self.parameters is None else {"parameters": self.parameters}
        return Tool(name=self.name, description=self.description, strict=bool(self.strict), **given)


class FunctionTool(Body, kw_only=True):
    kinds = ("function",)

    type: str
    function: Function | None = None
    custom: GivenRaw = UNSET  # of another type


class FunctionName(Body, kw_only=True):
    name: str


class AllowedTool(Body, kw_only=True):
    kinds = ("function",)

    type: str
    function: FunctionName


class AllowedTools(Body, kw_only=True):
    mode: str
    tools: list[AllowedTool]


class NamedTool(Body, kw_only=True):
    kinds = ("function", "allowed_tools")

    type: str
    function: FunctionName | None = None
    allowed_tools: AllowedTools | None = None
    custom: GivenRaw = UNSET  # of another type

    @property
    def is_named(self) -> bool:
        return self.type == "function"


class FunctionCall(Body, kw_only=True):
    name: str
    arguments: str


class ToolCall(Body, kw_only=True):
    """A call in an assistant's message."""

    kinds = ("function",)

    id: str
    type: str = "function"
    function: FunctionCall | None = None
    index: int | None = None  # what was streamed is sent back with it by some clients
    custom: GivenRaw = UNSET  # of another type


def chat_tools(given: Sequence[FunctionTool], choice: str | NamedTool | None, *, parallel: bool) -> Tools:
    """Raises `InvalidArgumentError`."""
    check_num_tools(len(given), "tools")
    tools = []
    for index, one in enumerate(given):
        if one.type != "function":
            raise InvalidArgumentError(f"tools[{index}].type", f'must be "function", not {one.type!r}')
        if one.function is None:
            raise InvalidArgumentError(f"tools[{index}].function", "is required")
        _refuse(one, f"tools[{index}]", "custom")
        tools.append(one.function.tool())
    named, allowed = "", None
    if isinstance(choice, NamedTool) and choice.type == "allowed_tools":
        if choice.allowed_tools is None:
            raise InvalidArgumentError("tool_choice.allowed_tools", "is required")
        _refuse(choice, "tool_choice", "custom", "function", kind="allowed_tools")
        allowed, where = [], "tool_choice.allowed_tools"
        for index, entry in enumerate(choice.allowed_tools.tools):
            if entry.type != "function":
                raise InvalidArgumentError(f"{where}.tools[{index}].type", f'must be "function", not {entry.type!r}')
            allowed.append(entry.function.name)
        choice = allowed_mode(choice.allowed_tools.mode, f"{where}.mode")
    elif isinstance(choice, NamedTool):
        if choice.type != "function":
            raise InvalidArgumentError(
                "tool_choice.type", f'must be "function" or "allowed_tools", not {choice.type!r}'
            )
        if choice.function is None:
            raise InvalidArgumentError("tool_choice.function", "is required")
        _refuse(choice, "tool_choice", "custom", "allowed_tools")
        if not choice.function.name:
            raise InvalidArgumentError("tool_choice.function.name", "must not be empty")
        named, choice = choice.function.name, "required"
    return make_tools(
        tools,
        "tools",
        choice=choice or "auto",
        named=named,
        allowed=allowed,
        allowed_field="tool_choice.allowed_tools.tools",
        parallel=parallel,
        inner=".function",
    )


def allowed_mode(mode: str, where: str) -> str:
    """How the model calls some of its tools. Raises `InvalidArgumentError`."""
    if mode not in ("auto", "required"):
        raise InvalidArgumentError(where, f'must be "auto" or "required", not {mode!r}')
    return mode


def calls_of(given: Sequence[ToolCall], where: str) -> list[Call]:
    """The calls of an assistant's message, whose place in the request is `where`."""
    calls = []
    for index, one in enumerate(given):
        place = f"{where}.tool_calls[{index}]"
        if one.type != "function":
            raise InvalidArgumentError(f"{place}.type", f'must be "function", not {one.type!r}')
        if one.function is None:
            raise InvalidArgumentError(f"{place}.function", "is required")
        _refuse(one, place, "custom")
        calls.append(Call(call_id=one.id, name=one.function.name, arguments=one.function.arguments))
    return calls


def _refuse(given: Body, where: str, *names: str, kind: str = "function") -> None:
    """Fields of other types beside `kind`."""
    for name in names:
        value = getattr(given, name)
        if is_given(value) or isinstance(value, Body):
            raise InvalidArgumentError(f"{where}.{name}", f'is not a field of type "{kind}"')


def delta_json(delta: ToolCallDelta) -> JsonObject:
    """A piece of a call in one chunk of a stream."""
    if not delta.call_id:
        return {"index": delta.index, "function": {"arguments": delta.arguments}}
    function = {"name": delta.name, "arguments": delta.arguments}
    return {"index": delta.index, "id": delta.call_id, "type": "function", "function": function}


class WholeCalls:
    """The calls of an answer that is not streamed."""

    def __init__(self) -> None:
        self._calls: list[tuple[ToolCallDelta, list[str]]] = []

    def add(self, deltas: Sequence[ToolCallDelta]) -> None:
        for delta in deltas:
            if delta.call_id:
                self._calls.append((delta, []))
            self._calls[delta.index][1].append(delta.arguments)

    def calls(self) -> list[tuple[ToolCallDelta, str]]:
        """(the first piece of each call, all of its arguments)."""
        return [(first, "".join(arguments)) for first, arguments in self._calls]

    def json(self) -> list[JsonObject]:
        return [
            {"id": first.call_id, "type": "function", "function": {"name": first.name, "arguments": arguments}}
            for first, arguments in self.calls()
        ]
