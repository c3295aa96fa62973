"""What clients say in a conversation, and what comes back of calls of tools. Plain values, without protobuf or grpc."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, frozen=True)
class Tool:
    """A function that the model may call. `parameters` is the JSON Schema of an object."""

    name: str
    description: str = ""
    parameters: Mapping[str, object] | None = None
    strict: bool = False


@dataclass(slots=True, frozen=True)
class ToolCall:
    """A call that the model made. `arguments` is JSON text, of an object if the model did as it should."""

    id: str
    name: str
    arguments: str

    def values(self) -> dict[str, object]:
        """The arguments. Raises `ValueError` if they are no JSON object, as in an answer that was cut off."""
        values = json.loads(self.arguments)
        if not isinstance(values, dict):
            raise ValueError(f"the arguments of {self.name} are no object")
        return values


@dataclass(slots=True, frozen=True)
class ToolCallDelta:
    """What is new of a call. The first of each call has its id and name."""

    index: int
    id: str
    name: str
    arguments: str


@dataclass(slots=True, frozen=True, kw_only=True)
class Message:
    """One message: of role system, user, assistant or tool."""

    role: str
    content: str = ""
    tool_calls: Sequence[ToolCall] = ()  # assistant
    tool_call_id: str = ""  # tool: whose result `content` is
    name: str = ""  # who speaks, or the tool that was called: for the chat template, which may write it out
    reasoning: str = ""  # assistant


@dataclass(slots=True)
class Calls:
    """Deltas put together."""

    deltas: list[ToolCallDelta] = field(default_factory=list)

    def whole(self) -> tuple[ToolCall, ...]:
        made: dict[int, list[ToolCallDelta]] = {}
        for delta in self.deltas:
            made.setdefault(delta.index, []).append(delta)
        return tuple(
            ToolCall(deltas[0].id, deltas[0].name, "".join(delta.arguments for delta in deltas))
            for _, deltas in sorted(made.items())
        )
