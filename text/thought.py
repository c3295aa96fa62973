"""The reasoning with which an answer may begin: whether there is any, and its form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from text.conversation import Json

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


def after_thought(thought: Thought, answer: Json, tokens: Mapping[str, int]) -> Json:
    """The form (of a structural tag) of an answer that is `answer` after the reasoning. `tokens`: see `mark`."""
    one = {"type": "mark", "value": "\n"}  # whatever the answer may begin with, these are the gap's
    gap: Json = {"type": "optional", "content": one}
    for _ in range(MAX_BREAKS - 1):
        gap = {"type": "optional", "content": {"type": "sequence", "elements": [one, gap]}}
    reasoning = [{"type": "text_until", "end": mark(thought.close, tokens)}, gap]
    if not thought.open:
        return {"type": "sequence", "elements": [*reasoning, answer]}
    begun = {"type": "sequence", "elements": [mark(thought.open, tokens), *reasoning]}
    return {"type": "sequence", "elements": [{"type": "optional", "content": begun}, answer]}


def mark(text: str, tokens: Mapping[str, int]) -> Json:
    """`tokens`: ids by text of tokens that were added to the vocabulary, special or not. Models write a mark as its one
    token, and to grammars some of these are no text."""
    return {"type": "mark", "value": text} | ({"token": tokens[text]} if text in tokens else {})
