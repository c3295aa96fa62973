"""The messages of `/v1/messages`: blocks of several kinds, and the conversation that they make together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import ClassVar, cast

from msgspec import UNSET, Raw

from common.errors import InvalidArgumentError
from router.api.rest.openai.body_types import Body, GivenRaw, asks, is_given, is_list, refuse_unless
from router.api.rest.openai.kept_reasoning import given_back
from router.api.rest.openai.responses_input import Turn
from text.conversation import Call, check_call_id, check_name, joined_parts

ROLES = ("user", "assistant", "system")
FIELDS = {
    "text": {"text", "citations"},
    "thinking": {"thinking", "signature"},
    "tool_use": {"id", "name", "input", "caller"},
    "tool_result": {"tool_use_id", "content", "is_error"},
}
"""The fields that each kind of block has."""
FIELDS_OF_OTHERS = {kind: sorted({*chain.from_iterable(FIELDS.values())} - own) for kind, own in FIELDS.items()}
ROLE_OF = {"thinking": "assistant", "tool_use": "assistant", "tool_result": "user"}  # text is everybody's
ERROR_MARK = "Error: "  # before a result that says so: chat templates have no other word for it
KEPT_S = {"5m": 300.0, "1h": 3600.0}  # what `cache_control` may ask for, by its `ttl`


class CacheControl(Body, kw_only=True):
    """Asks to keep the KV of the prompt."""

    type: str
    ttl: str | None = None

    def seconds(self, where: str) -> float:
        """Raises `InvalidArgumentError`."""
        if self.type != "ephemeral":
            raise InvalidArgumentError(f"{where}.type", f'must be "ephemeral", not {self.type!r}')
        if self.ttl not in (None, *KEPT_S):
            raise InvalidArgumentError(f"{where}.ttl", f"must be one of {', '.join(KEPT_S)}, not {self.ttl!r}")
        return KEPT_S[self.ttl or "5m"]


class TextBlock(Body, kw_only=True):
    """Of the system prompt, or of a tool's result."""

    kinds = ("text",)

    type: str
    text: str | None = None
    citations: GivenRaw = UNSET  # an assistant's text may have them; prompts have no place for them
    cache_control: CacheControl | None = None

    # Of blocks that are not supported, so that their kind is refused and not a field.
    source: GivenRaw = UNSET
    title: GivenRaw = UNSET
    context: GivenRaw = UNSET
    data: GivenRaw = UNSET

    other_kinds: ClassVar[tuple[str, ...]] = ("source", "title", "context", "data")


class Block(Body, kw_only=True):
    """One of several kinds, by `type`."""

    kinds = tuple(FIELDS)

    type: str
    text: str | None = None
    citations: GivenRaw = UNSET
    thinking: str | None = None
    signature: str | None = None
    id: str | None = None
    name: str | None = None
    input: GivenRaw = UNSET
    caller: GivenRaw = UNSET  # who asked for the call
    tool_use_id: str | None = None
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None

    # Of blocks that are not supported, so that their kind is refused and not a field.
    source: GivenRaw = UNSET
    title: GivenRaw = UNSET
    context: GivenRaw = UNSET
    data: GivenRaw = UNSET

    other_kinds: ClassVar[tuple[str, ...]] = ("source", "title", "context", "data")


class Message(Body, kw_only=True):
    role: str
    content: str | list[Block]


def num_blocks(system: str | list[TextBlock] | None, messages: Sequence[Message]) -> int:
    """How many blocks there are, those of tools' results included."""
    given = [message.content for message in messages if isinstance(message.content, list)]
    inner = sum(len(block.content) for blocks in given for block in blocks if isinstance(block.content, list))
    return inner + sum(map(len, given)) + (len(system) if isinstance(system, list) else 0)


def marks(system: str | list[TextBlock] | None, messages: Sequence[Message]) -> Iterator[tuple[str, CacheControl]]:
    """Each `cache_control` and where it is."""
    for index, part in enumerate(system if isinstance(system, list) else ()):
        if part.cache_control is not None:
            yield f"system[{index}].cache_control", part.cache_control
    for number, message in enumerate(messages):
        for index, block in enumerate(message.content if isinstance(message.content, list) else ()):
            where = f"messages[{number}].content[{index}]"
            if block.cache_control is not None:
                yield f"{where}.cache_control", block.cache_control
            for inner, part in enumerate(block.content if isinstance(block.content, list) else ()):
                if part.cache_control is not None:
                    yield f"{where}.content[{inner}].cache_control", part.cache_control


def turns_of(messages: Sequence[Message]) -> list[Turn]:
    """Neighbouring messages of one role are one turn; each result of a tool is a turn of its own."""
    turns: list[Turn] = []
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        if message.role not in ROLES:
            raise InvalidArgumentError(f"{where}.role", f"must be one of {', '.join(ROLES)}, not {message.role!r}")
        if isinstance(message.content, str):
            _turn(turns, where, message.role).texts.append(message.content)
            continue
        if not message.content:
            raise InvalidArgumentError(f"{where}.content", "must not be empty")
        for index, block in enumerate(message.content):
            _add(turns, where, message.role, block, f"{where}.content[{index}]")
    return turns


def text_of(content: str | list[TextBlock] | None, where: str) -> str:
    """Raises `InvalidArgumentError`."""
    if isinstance(content, str):
        return content
    return joined_parts(_text(block, f"{where}[{index}]") for index, block in enumerate(content or ()))


def _text(block: TextBlock | Block, where: str, role: str = "") -> str:
    if block.type != "text":
        raise InvalidArgumentError(f"{where}.type", f'must be "text", not {block.type!r}: no others are supported')
    for name in block.other_kinds:
        if is_given(getattr(block, name)):
            raise InvalidArgumentError(f"{where}.{name}", 'is not a field of type "text"')
    if block.text is None:
        raise InvalidArgumentError(f"{where}.text", "must be a string")
    if not is_list(block.citations):
        raise InvalidArgumentError(f"{where}.citations", "must be a list")
    if role != "assistant" and asks(block.citations):
        raise InvalidArgumentError(f"{where}.citations", "only an assistant's text can have them")
    return block.text


def _turn(turns: list[Turn], where: str, role: str) -> Turn:
    """The last turn if it is of `role`, or a new one."""
    if not turns or turns[-1].role != role:
        turns.append(Turn(where, role))
    return turns[-1]


def _add(turns: list[Turn], where: str, role: str, block: Block, place: str) -> None:
    """`where` is the message's name, `place` the block's."""
    if block.type not in FIELDS:
        known = " or ".join(f'"{one}"' for one in FIELDS)
        raise InvalidArgumentError(f"{place}.type", f"must be {known}, not {block.type!r}: no others are supported")
    if ROLE_OF.get(block.type, role) != role:
        reason = f"{block.type!r} is only for messages of role {ROLE_OF[block.type]!r}"
        raise InvalidArgumentError(f"{place}.type", reason)
    for name in (*FIELDS_OF_OTHERS[block.type], *block.other_kinds):
        value = getattr(block, name)
        if is_given(value) if value is UNSET or isinstance(value, Raw) else value is not None:
            raise InvalidArgumentError(f"{place}.{name}", f'is not a field of type "{block.type}"')
    if block.type == "text":
        _turn(turns, where, role).texts.append(_text(block, place, role))
    elif block.type == "thinking":
        text, turn = _thinking(block, place), _turn(turns, where, role)
        if text:
            turn.thoughts.append(text)
    elif block.type == "tool_use":
        _turn(turns, where, role).calls.append(_call(block, place))
    else:
        turn = Turn(where, "tool")
        turn.call_id = check_call_id(block.tool_use_id or "", f"{place}.tool_use_id")
        text = text_of(block.content, f"{place}.content")
        turn.texts.append(f"{ERROR_MARK}{text}" if block.is_error else text)
        turns.append(turn)


def _thinking(block: Block, where: str) -> str:
    """The text, or what the signature keeps of it: answers with `"display": "omitted"` have it there alone."""
    if block.thinking is None:
        raise InvalidArgumentError(f"{where}.thinking", "must be a string")
    if block.thinking or not block.signature:
        return block.thinking
    return given_back(block.signature, f"{where}.signature")


def _call(block: Block, where: str) -> Call:
    id_place, name_place, place = (f"{where}.id", f"{where}.name", f"{where}.input")
    call_id, name = check_call_id(block.id or "", id_place), check_name(block.name or "", name_place)
    given = bytes(cast("Raw", block.input)) if is_given(block.input) else b""
    if not given.lstrip().startswith(b"{"):
        raise InvalidArgumentError(place, "must be an object")
    refuse_unless(block, "caller", {"type": "direct"}, where=where)
    return Call(call_id=call_id, name=name, arguments=given.decode(), places=(id_place, name_place, place))
