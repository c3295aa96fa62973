"""The reasoning with which an answer may begin: whether there is any, and its form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from router.text.conversation import Json

MAX_BREAKS = 2  # line breaks that a model may write after its reasoning: they are no part of what follows


@dataclass(slots=True, frozen=True)
class Thought:
    """Reasoning up to `close`. The model begins it with `open`, or goes on at once; `open` is empty if the prompt has
    begun it."""

    open: str
    close: str


def thought_after(prompt: str, begun: str, open_mark: str, close_mark: str) -> Thought | None:
    """`begun`: what the prompt has of the answer; empty if nobody knows where in `prompt` the answer begins."""
    if begun:
        opened, closed = begun.rfind(open_mark), begun.rfind(close_mark)
        if max(opened, closed) < 0:
            return None if begun.strip() else Thought(open_mark, close_mark)
        return Thought("", close_mark) if opened > closed else None
    end = prompt.rstrip()
    if end.endswith(close_mark):
        return None
    return Thought("" if end.endswith(open_mark) else open_mark, close_mark)


def after_thought(thought: Thought, answer: Json, special: Mapping[str, int]) -> Json:
    """The form (of a structural tag) of an answer that is `answer` after the reasoning. `special`: ids of special
    tokens by their text."""
    breaks = [{"type": "const_string", "value": "\n" * num} for num in range(MAX_BREAKS, 0, -1)]
    end = _token(thought.close, special) or thought.close
    reasoning = [
        {"type": "text_until", "end": end},
        {"type": "optional", "content": {"type": "or", "elements": breaks}},
    ]
    if not thought.open:
        return {"type": "sequence", "elements": [*reasoning, answer]}
    begin = _token(thought.open, special) or {"type": "mark", "value": thought.open}
    first = {"type": "optional", "content": {"type": "sequence", "elements": [begin, *reasoning]}}
    return {"type": "sequence", "elements": [first, answer]}


def _token(text: str, special: Mapping[str, int]) -> Json | None:
    return {"type": "token", "token": special[text]} if text in special else None
