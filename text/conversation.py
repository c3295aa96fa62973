"""A conversation as chat templates take it: messages, the tools that the model may call, and how it may call them.

gRPC and REST both make theirs here, so that both refuse the same things. Each function raises `InvalidArgumentError`
with the field as the client wrote it.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from common.errors import InvalidArgumentError
from common.validation import chat_role

Json = dict[str, Any]
Message = Mapping[str, Any]
"""`role` and `content`, maybe `name`, which few templates write out; an assistant's may have `tool_calls` and
`reasoning_content`, a tool's has `tool_call_id`."""

MAX_TOOLS = 128
MAX_CALLS = 128  # in one message
MAX_ID_CHARS = 256
MAX_DEPTH = 32  # of a tool's parameters, of a call's arguments, and of options of the template
MAX_OPTIONS = 32
MAX_VALUES = 16_384
"""Values (texts, numbers, lists, objects, and names of members) in all parameters of tools together; in all calls of
messages, their arguments and themselves; and in options of the template. A value without text is a byte or two of a
body, and microseconds of work."""
MAX_PARTS = 4096  # of all messages together that are given in parts of text
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)
_OWN_VARIABLES = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")  # of reasoning, OpenAI's words
DEFAULT_EFFORT = "medium"

Choice = Literal["auto", "none", "required"]
CHOICES: tuple[Choice, ...] = ("auto", "none", "required")


@dataclass(slots=True, frozen=True, kw_only=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: Json = field(default_factory=lambda: {"type": "object", "properties": {}})  # JSON Schema
    strict: bool = False  # whether arguments have to be valid under `parameters`

    def as_json(self) -> Json:
        """The tool in the form that chat templates know."""
        described = {} if self.description is None else {"description": self.description}
        return {"type": "function", "function": {"name": self.name, **described, "parameters": self.parameters}}


@dataclass(slots=True, frozen=True, kw_only=True)
class Tools:
    """What the model may call. With `named`, it has to call that one; with `required`, one of them."""

    tools: tuple[Tool, ...] = ()
    choice: Choice = "auto"
    named: str = ""
    allowed: frozenset[str] | None = None  # names of those that it may call, if these are not all that it is told of
    parallel: bool = True  # whether one answer may hold several calls
    inner: str = ""  # what the client's entries have around a tool: ".function", or nothing
    schema_name: str = "parameters"  # the client's name for the schema of a tool

    def place(self, index: int) -> str:
        """The client's name for a tool."""
        return f"tools[{index}]{self.inner}"

    def schema_place(self, index: int) -> str:
        """The client's name for a tool's schema."""
        return f"{self.place(index)}.{self.schema_name}"

    def may_call(self, name: str) -> bool:
        return self.allowed is None or name in self.allowed

    @property
    def callable(self) -> tuple[Tool, ...]:
        """The tools that the model may call."""
        return tuple(tool for tool in self.shown if self.may_call(tool.name))

    @property
    def shown(self) -> tuple[Tool, ...]:
        """The tools that the model is told of; none if it must not call any."""
        return () if self.choice == "none" else self.tools

    @property
    def is_forced(self) -> bool:
        return self.choice == "required" or bool(self.named)


@dataclass(slots=True, frozen=True, kw_only=True)
class Conversation:
    messages: Sequence[Message]
    tools: Tools = field(default_factory=Tools)
    template_options: Mapping[str, Any] = field(default_factory=dict)  # further variables of the chat template
    effort: str = ""  # of reasoning, one of `EFFORTS`; empty if the client named none
    effort_field: str = "reasoning_effort"  # the client's name for it
    chat_template: str = ""  # the client's own, in place of the model's
    has_generic_tools: bool = False  # tools, calls and results are written as `generic_tools` does
    asks_answer: bool = True  # whether the template writes the beginning of an answer behind the messages
    continues_last: bool = False  # whether the answer continues the last message; see `check_continued`
    continued_field: str = "continue_final_message"  # what of the request asks for that

    @property
    def has_calls(self) -> bool:
        """Whether the messages hold calls of tools, or results."""
        return any(message["role"] == "tool" or "tool_calls" in message for message in self.messages)

    @property
    def continued(self) -> str | None:
        """The text that the answer continues; None if it begins anew."""
        return str(self.messages[-1]["content"]) if self.continues_last else None


@dataclass(slots=True, frozen=True, kw_only=True)
class Call:
    """A call of a tool in an earlier answer."""

    call_id: str
    name: str
    arguments: str  # JSON text of an object
    places: tuple[str, str, str] | None = None  # the client's names for these three, if they are not those of chat


class CallIds:
    """Ids of the calls in a history. One without an id gets one, and so does its result: templates write them out, and
    some demand them. Results come in the order of their calls."""

    def __init__(self) -> None:
        self._num_made = 0
        self._unanswered: deque[str] = deque()  # of the last message with calls, those that were made here

    def begin_calls(self) -> Callable[[str, str], str]:
        """What gives the calls of one more message their ids."""
        self._unanswered.clear()
        return self._of_call

    def _of_call(self, given: str, where: str) -> str:
        if given:
            return check_call_id(given, where)
        self._num_made += 1
        made = f"call{self._num_made:05}"  # nine letters and digits, as Mistral's templates require
        self._unanswered.append(made)
        return made

    def of_result(self, given: str, where: str) -> str:
        if not given and self._unanswered:
            return self._unanswered.popleft()
        return check_call_id(given, where)


def make_message(
    where: str,
    *,
    role: str,
    content: str | None,
    name: str | None = None,
    calls: Sequence[Call] = (),
    calls_field: str = "",
    tool_call_id: str | None = None,
    reasoning: str | None = None,
    values: ValueCount | None = None,
    ids: CallIds | None = None,
) -> Json:
    """`where` is the message's place in the request: `messages[3]`. `calls_field`: what holds all of its calls, if that
    is not chat's `tool_calls`. `values`, `ids`: of the messages before it. Without `ids` every call needs an id."""
    role = chat_role(role, f"{where}.role")
    if calls and role != "assistant":
        raise InvalidArgumentError(f"{where}.tool_calls", "only an assistant's message can have them")
    if reasoning and role != "assistant":
        raise InvalidArgumentError(f"{where}.reasoning_content", "only an assistant's message can have it")
    if content is None and not calls:
        raise InvalidArgumentError(f"{where}.content", "must be a string or a list of text parts")
    message: Json = {"role": role, "content": content or ""}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        calls_field = calls_field or f"{where}.tool_calls"
        message["tool_calls"] = _calls(calls, calls_field, values or ValueCount(), ids)
    if role == "tool":
        of_result = check_call_id if ids is None else ids.of_result
        message["tool_call_id"] = of_result(tool_call_id or "", f"{where}.tool_call_id")
    elif tool_call_id:
        raise InvalidArgumentError(f"{where}.tool_call_id", "only a tool's message can have it")
    if name:
        message["name"] = check_name(name, f"{where}.name")
    return message


def check_continued(messages: Sequence[Message], where: str) -> None:
    """Checks whether an answer can continue the last message."""
    if messages[-1]["role"] != "assistant":
        raise InvalidArgumentError(where, "the last message must be the assistant's")
    if messages[-1].get("tool_calls"):
        raise InvalidArgumentError(where, "the last message must not have tool_calls")


def joined_parts(texts: Iterable[str]) -> str:
    """The text of a message that is given in parts: each on a line of its own."""
    return "\n".join(texts)


def named_results(messages: Sequence[Json]) -> list[Json]:
    """Messages of tools with the name of the tool that was called, which some templates write out."""
    names: dict[str, str] = {}
    for message in messages:
        for call in message.get("tool_calls", ()):
            names[call["id"]] = call["function"]["name"]
        if message["role"] == "tool" and "name" not in message and message["tool_call_id"] in names:
            message["name"] = names[message["tool_call_id"]]
    return list(messages)


def check_num_parts(num_parts: int, name: str) -> None:
    """`num_parts`: of all messages together. Raises `InvalidArgumentError` before any of them is looked at."""
    if num_parts > MAX_PARTS:
        raise InvalidArgumentError(name, f"must have at most {MAX_PARTS} parts of text in all, not {num_parts}")


def check_num_calls(num_calls: int, name: str) -> None:
    """`num_calls`: of one message. Raises `InvalidArgumentError` before any of them is looked at."""
    if num_calls > MAX_CALLS:
        raise InvalidArgumentError(name, f"must have at most {MAX_CALLS} entries, not {num_calls}")


def _calls(calls: Sequence[Call], where: str, values: ValueCount, ids: CallIds | None) -> list[Json]:
    check_num_calls(len(calls), where)
    of_call = check_call_id if ids is None else ids.begin_calls()
    values.add(len(calls), where)
    made = []
    for index, call in enumerate(calls):
        one = f"{where}[{index}]"
        id_place, name_place, place = call.places or (f"{one}.id", f"{one}.function.name", f"{one}.function.arguments")
        check_name(call.name, name_place)
        arguments = _arguments(call.arguments, place, values)
        made.append(
            {
                "id": of_call(call.call_id, id_place),
                "type": "function",
                "function": {"name": call.name, "arguments": arguments},
            }
        )
    return made


def _arguments(text: str, where: str, values: ValueCount) -> Json | str:
    """The arguments as templates take them: an object. Some clients write no text at all if there are none. A text that
    is no object's stays as it is: an answer may have been cut inside it, and the talk has to go on."""
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return text
    if not isinstance(arguments, dict):
        return text
    values.check(arguments, where)  # before each value is looked at
    return arguments if is_unicode(arguments) else text


def with_objects(messages: Sequence[Message]) -> list[Json] | None:
    """`messages` for templates that read arguments member by member: those that are a text become the only member of an
    object. None if there are none."""
    is_changed = False
    made = []
    for message in messages:
        calls = []
        for call in message.get("tool_calls", ()):
            function = call["function"]
            if isinstance(function["arguments"], str):
                is_changed = True
                function = {**function, "arguments": {"arguments": function["arguments"]}}
            calls.append({**call, "function": function})
        made.append({**message, "tool_calls": calls} if calls else dict(message))
    return made if is_changed else None


def check_call_id(call_id: str, where: str) -> str:
    if not call_id:
        raise InvalidArgumentError(where, "must not be empty")
    if len(call_id) > MAX_ID_CHARS:
        raise InvalidArgumentError(where, f"must have at most {MAX_ID_CHARS} characters, not {len(call_id)}")
    return call_id


def check_name(name: str, where: str) -> str:
    if not _NAME.fullmatch(name):
        raise InvalidArgumentError(where, "must have 1 to 64 ASCII letters, digits, _ or -")
    return name


def check_num_tools(num_tools: int, name: str) -> None:
    """Raises `InvalidArgumentError` before any of them is looked at."""
    if num_tools > MAX_TOOLS:
        raise InvalidArgumentError(name, f"must have at most {MAX_TOOLS} entries, not {num_tools}")


def make_tools(
    tools: Sequence[Tool],
    where: str,
    *,
    choice: str = "auto",
    named: str = "",
    allowed: Sequence[str] | None = None,
    allowed_field: str = "tool_choice",
    parallel: bool = True,
    inner: str = "",
    schema_name: str = "parameters",
) -> Tools:
    """Checks the tools and whether what is asked of them can be: `where` is their place in the request. `allowed`,
    `inner`, `schema_name`: see `Tools`; `allowed_field`: the client's name for `allowed`."""
    check_num_tools(len(tools), where)
    made = Tools(tools=tuple(tools), parallel=parallel, inner=inner, schema_name=schema_name)
    names: set[str] = set()
    values = ValueCount()
    for index, tool in enumerate(tools):
        place, schema = made.place(index), made.schema_place(index)
        check_name(tool.name, f"{place}.name")
        if tool.name in names:
            raise InvalidArgumentError(f"{place}.name", f"{tool.name!r} is there twice")
        names.add(tool.name)
        if tool.parameters.get("type", "object") != "object":
            raise InvalidArgumentError(schema, 'must be a JSON Schema of type "object"')
        values.check(tool.parameters, schema)
        if not is_unicode(tool.parameters):
            raise InvalidArgumentError(schema, "is not valid Unicode: half of a character is alone")
    if choice not in CHOICES:
        raise InvalidArgumentError("tool_choice", f"must be one of {', '.join(CHOICES)} or name a function")
    if named and named not in names:
        raise InvalidArgumentError("tool_choice", f"{named!r} is not among the tools")
    if choice == "required" and not tools:
        raise InvalidArgumentError("tool_choice", "is only allowed with tools")
    if allowed is not None:
        check_num_tools(len(allowed), allowed_field)
        if not allowed:
            raise InvalidArgumentError(allowed_field, "must name a tool")
        if unknown := next((name for name in allowed if name not in names), ""):
            raise InvalidArgumentError(allowed_field, f"{unknown!r} is not among the tools")
    return replace(made, choice=choice, named=named, allowed=None if allowed is None else frozenset(allowed))


def check_options(options: Mapping[str, Any], where: str) -> None:
    """Checks further variables of the chat template."""
    if len(options) > MAX_OPTIONS:
        raise InvalidArgumentError(where, f"must have at most {MAX_OPTIONS} entries, not {len(options)}")
    ValueCount().check(options, where)
    if not is_unicode(options):
        raise InvalidArgumentError(where, "is not valid Unicode: half of a character is alone")
    for name in options:
        if name in _OWN_VARIABLES:
            raise InvalidArgumentError(f"{where}.{name}", "is not for clients to set")


def check_effort(effort: str | None, where: str) -> str:
    """Checks the effort; empty if the client named none. Only the chat template knows whether the model has efforts."""
    if effort is not None and effort not in EFFORTS:
        raise InvalidArgumentError(where, f"must be one of {', '.join(EFFORTS)}")
    return effort or ""


def is_unicode(value: object) -> bool:
    """False if a text in JSON has half of a character alone: JSON can say so (`"\\ud800"`), and UTF-8 cannot."""
    try:
        return all(text.isascii() or text.encode() for text in texts_of(value) if text)
    except UnicodeEncodeError:
        return False


class ValueCount:
    """Values in JSON from one client that is taken one piece after the other: at most `MAX_VALUES`."""

    def __init__(self) -> None:
        self.num = 0

    def add(self, num: int, where: str) -> None:
        self.num += num
        if self.num > MAX_VALUES:
            raise InvalidArgumentError(
                where, f"with it there are more than {MAX_VALUES} values in all: numbers, texts, names, lists, objects"
            )

    def check(self, value: object, where: str) -> None:
        """Adds the values in `value`. A list that is too long is refused before its entries are looked at, and JSON of
        any depth would need a stack of any depth."""
        level = [value]
        for _ in range(MAX_DEPTH):
            inner: list[object] = []
            for one in level:
                if isinstance(one, Mapping):
                    self.add(2 * len(one), where)
                    inner.extend(one.values())
                elif isinstance(one, list | tuple):
                    self.add(len(one), where)
                    inner.extend(one)
            if not inner:
                return
            level = inner
        raise InvalidArgumentError(where, f"is nested more than {MAX_DEPTH} deep")


def texts_of(value: object) -> list[str]:
    """Every text in JSON, names of members included."""
    return read_through(value)[0]


def read_through(value: object) -> tuple[list[str], int]:
    """(every text in JSON, names of members included; how many values there are, texts and names among them)."""
    texts: list[str] = []
    num, left = 0, [value]
    while left:
        one = left.pop()
        num += 1
        if isinstance(one, str):
            texts.append(one)
        elif isinstance(one, Mapping):
            left.extend(one.keys())
            left.extend(one.values())
        elif isinstance(one, list | tuple):
            left.extend(one)
    return texts, num
