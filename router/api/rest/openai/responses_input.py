"""The input of `/v1/responses`: items of several kinds, and the messages that they make together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import ClassVar

from msgspec import UNSET, field

from common.errors import InvalidArgumentError
from router.api.rest.openai.body_types import Body, GivenRaw, is_list, refuse_if_asked
from router.api.rest.openai.kept_reasoning import given_back
from text.conversation import Call, CallIds, Json, ValueCount, joined_parts, make_message

FIELDS = {
    "message": {"role", "content", "name"},
    "function_call": {"call_id", "name", "arguments"},
    "function_call_output": {"call_id", "name", "output"},
    "reasoning": {"content", "summary", "encrypted_content"},
}
"""The fields that each kind of item has."""
FIELDS_OF_OTHERS = {kind: sorted({*chain.from_iterable(FIELDS.values())} - own) for kind, own in FIELDS.items()}
TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text")


class Part(Body, kw_only=True, omit_defaults=True):
    type: str
    text: str | None = None
    refusal: str | None = None
    prompt_cache_breakpoint: GivenRaw = UNSET  # where a prompt's cached part may end; here it may end anywhere

    # Answers have these, and clients send them back. Prompts have no place for them.
    annotations: GivenRaw = UNSET
    logprobs: GivenRaw = UNSET


class InputItem(Body, kw_only=True, omit_defaults=True):
    """One of several kinds, by `type`: a message, a function's call, its output, reasoning."""

    kinds = tuple(FIELDS)

    type: str = "message"
    role: str | None = None
    content: str | list[Part] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[Part] | None = None
    summary: list[Part] | None = None
    encrypted_content: str | None = None

    # Answers have these, and clients send them back. Prompts have no place for them.
    id: str | None = None
    status: str | None = None
    phase: str | None = None

    # Answers have these, too. Each must be empty.
    caller: GivenRaw = UNSET
    namespace: GivenRaw = UNSET
    async_: GivenRaw = field(default=UNSET, name="async")

    unsupported: ClassVar[tuple[str, ...]] = ("caller", "namespace", "async_")


class Turn:
    """Items that make one message: an assistant's reasoning, words and calls are items of their own. Texts are joined
    when all of them are there: there may be thousands."""

    def __init__(self, where: str, role: str) -> None:
        self.where = where
        self.role = role
        self.texts: list[str] = []
        self.thoughts: list[str] = []  # of its reasoning
        self.calls: list[Call] = []
        self.call_id: str | None = None
        self.name: str | None = None

    def message(self, values: ValueCount, ids: CallIds) -> Json:
        return make_message(
            self.where,
            role=self.role,
            content=joined_parts(self.texts) if self.texts or not self.calls else None,
            name=self.name,
            calls=self.calls,
            calls_field=self.where,
            tool_call_id=ids.of_result(self.call_id, f"{self.where}.call_id") if self.call_id is not None else None,
            reasoning=joined_parts(self.thoughts),
            values=values,
            ids=ids,
        )


def items_of(given: str | list[InputItem]) -> list[tuple[str, InputItem]]:
    """The items of `input`, each with the client's name for it."""
    if isinstance(given, str):
        return [("input", InputItem(role="user", content=given))]
    return [(f"input[{index}]", item) for index, item in enumerate(given)]


def num_parts(items: Sequence[InputItem]) -> int:
    """How many parts all items have whose text is given in parts."""
    given = (text for item in items for text in (item.content, item.output, item.summary))
    return sum(len(text) for text in given if isinstance(text, list))


def turns_of(items: Iterable[tuple[str, InputItem]]) -> list[Turn]:
    """`items` with the client's names for them."""
    turns: list[Turn] = []
    for where, item in items:
        refuse_if_asked(item, item.unsupported, where=where)
        for name in FIELDS_OF_OTHERS.get(item.type, ()):
            if getattr(item, name) is not None:
                raise InvalidArgumentError(f"{where}.{name}", f"is not a field of type {item.type!r}")
        if item.type == "function_call_output":
            if item.call_id is None:
                raise InvalidArgumentError(f"{where}.call_id", "is required")
            turn = Turn(where, "tool")
            turn.call_id, turn.name = item.call_id, item.name
            turn.texts.append(_text(item.output, f"{where}.output"))
            turns.append(turn)
        elif item.type == "message" and item.role != "assistant":
            turn = Turn(where, item.role or "")
            turn.texts.append(_text(item.content, f"{where}.content"))
            turn.name = item.name
            turns.append(turn)
        else:
            last = turns[-1] if turns and turns[-1].role == "assistant" else None
            _add(item, where, last, turns)
    return turns


def _add(item: InputItem, where: str, last: Turn | None, turns: list[Turn]) -> None:
    """An assistant's item joins its turn, or begins one."""
    if last is None or (item.type in ("reasoning", "message") and (last.texts or last.calls)):
        last = Turn(where, "assistant")
        turns.append(last)
    if item.type == "message":
        last.texts.append(_text(item.content, f"{where}.content"))
        last.name = item.name
    elif item.type == "function_call":
        if item.call_id is None:
            raise InvalidArgumentError(f"{where}.call_id", "is required")
        given = {"call_id": item.call_id, "name": item.name or "", "arguments": item.arguments or ""}
        last.calls.append(Call(**given, places=(f"{where}.call_id", f"{where}.name", f"{where}.arguments")))
    elif item.type == "reasoning":
        kept = given_back(item.encrypted_content, f"{where}.encrypted_content") if item.encrypted_content else ""
        if text := _text(item.content or kept or item.summary or "", f"{where}.content"):
            last.thoughts.append(text)
    else:
        raise InvalidArgumentError(f"{where}.type", f"{item.type!r} is not supported")


def _text(content: str | list[Part] | None, where: str) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        raise InvalidArgumentError(where, "is required")
    texts = []
    for index, part in enumerate(content):
        if part.type == "refusal":
            if part.refusal is None:
                raise InvalidArgumentError(f"{where}[{index}].refusal", "must be a string")
            texts.append(part.refusal)
            continue
        if part.refusal is not None:
            raise InvalidArgumentError(f"{where}[{index}].refusal", f"is not a field of type {part.type!r}")
        if part.type not in (*TEXT_PARTS, "summary_text"):
            raise InvalidArgumentError(f"{where}[{index}].type", "only parts of text are supported")
        if part.text is None:
            raise InvalidArgumentError(f"{where}[{index}].text", "must be a string")
        for name in ("annotations", "logprobs"):
            if not is_list(getattr(part, name)):
                raise InvalidArgumentError(f"{where}[{index}].{name}", "must be a list")
        texts.append(part.text)
    return joined_parts(texts)
