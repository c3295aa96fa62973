"""The parts of an answer as they come, and the interface of what separates them. Knows no request, model or worker."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

from common.types import FinishReason

_ID_CHARS = string.ascii_letters + string.digits


@dataclass(slots=True, frozen=True)
class ToolCallDelta:
    """The new part of one tool call. The first delta of a call has its id and name."""

    index: int  # of the call in its answer
    call_id: str = ""
    name: str = ""
    arguments: str = ""  # JSON text


@dataclass(slots=True, frozen=True)
class TextPart:
    text: str
    is_reasoning: bool = False


Part = TextPart | ToolCallDelta


@dataclass(slots=True)
class Pieces:
    """The pieces of an answer's parts that came since the last `take`, in the order in which the model wrote them."""

    parts: list[Part] = field(default_factory=list)

    def add_text(self, text: str, *, is_reasoning: bool = False) -> None:
        last = self.parts[-1] if self.parts else None
        if isinstance(last, TextPart) and last.is_reasoning is is_reasoning:
            self.parts[-1] = TextPart(last.text + text, is_reasoning)
        elif text:
            self.parts.append(TextPart(text, is_reasoning))

    def add_call(self, delta: ToolCallDelta) -> None:
        last = self.parts[-1] if self.parts else None
        if isinstance(last, ToolCallDelta) and last.index == delta.index:
            self.parts[-1] = replace(last, arguments=last.arguments + delta.arguments)
        else:
            self.parts.append(delta)

    def extend(self, later: Pieces) -> None:
        for part in later.parts:
            if isinstance(part, ToolCallDelta):
                self.add_call(part)
            else:
                self.add_text(part.text, is_reasoning=part.is_reasoning)

    @property
    def content(self) -> str:
        return "".join(one.text for one in self.parts if isinstance(one, TextPart) and not one.is_reasoning)

    @property
    def reasoning(self) -> str:
        return "".join(one.text for one in self.parts if isinstance(one, TextPart) and one.is_reasoning)

    @property
    def calls(self) -> list[ToolCallDelta]:
        return [one for one in self.parts if isinstance(one, ToolCallDelta)]


class Spaces:
    """Drops white space at the edges of a part."""

    def __init__(self) -> None:
        self._skip = False
        self._held = ""

    def begin(self) -> None:
        """A part begins, or another one ends this one."""
        self._skip, self._held = True, ""

    def add(self, text: str) -> str:
        if self._skip:
            text = text.lstrip()
            self._skip = not text
        text = self._held + text
        shown = text.rstrip()
        self._held = text[len(shown) :]
        return shown

    def end(self) -> str:
        held, self._held = self._held, ""
        return held


class PartsParser(Protocol):
    """Separates the parts of one answer as its text comes."""

    num_calls: int
    is_done: bool  # the answer has all the calls that it may have
    is_cut: bool  # known at the end: the answer ended inside a call

    def add(self, text: str) -> Pieces: ...

    def end(self) -> Pieces:
        """Ends the answer: gives the rest of its parts."""
        ...


def ended(parser: PartsParser, reason: FinishReason) -> FinishReason:
    """Why an answer ended that was read to its end; `reason`: why its text did. If it holds calls, all of them whole,
    they are why."""
    has_calls = parser.num_calls > 0 and not parser.is_cut
    return FinishReason.TOOL_CALLS if has_calls and reason is FinishReason.STOP else reason


@dataclass(slots=True, frozen=True, kw_only=True)
class Reading:
    """How an answer is read whose text has parts."""

    parser: Callable[[], PartsParser]
    fresh_parser: Callable[[], PartsParser]  # of an answer that does not go on with what the prompt began
    shown_token_ids: frozenset[int]  # control tokens that tell parts apart: the parser sees their text


def new_call_id() -> str:
    """A new id of a tool call: nine letters and digits, as Mistral's templates require. Other templates take any
    text."""
    return "".join(secrets.choice(_ID_CHARS) for _ in range(9))
