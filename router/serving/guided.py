"""Answers whose form the client or the tools prescribe: what they can be combined with, and whether their grammar is
valid."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from functools import partial

from common.errors import InvalidArgumentError
from common.guided import Guided, check_grammar
from common.sampling import FieldName, Given
from router.serving.threads import SHORT, TextThreads
from router.text.answer_parts import Reading
from router.text.conversation import Tools
from router.text.forced_calls import closed_schema

MAX_GOOD_GRAMMARS = 64
CHECK_EACH_S = 0.5


class Grammars:
    """Parses grammars, in threads of its own: a costly one takes half a second, and should hold up no text."""

    def __init__(self, threads: TextThreads) -> None:
        self._threads = threads
        self._good: dict[Guided, None] = {}  # the last ones

    async def check(self, guided: Guided | None, name: FieldName, tools: Tools | None = None) -> None:
        """`tools`: whose schemas `guided` is made of. Raises `InvalidArgumentError`."""
        if guided is None or guided in self._good:
            return
        await self._threads.run(SHORT + 1, partial(_check, guided, name, tools))
        self._good[guided] = None
        while len(self._good) > MAX_GOOD_GRAMMARS:
            del self._good[next(iter(self._good))]


def _check(guided: Guided, name: FieldName, tools: Tools | None) -> None:
    try:
        check_grammar(guided)
    except ValueError as error:
        if tools is not None:
            _check_each(tools)
        raise InvalidArgumentError(name("guided"), str(error)) from error


def _check_each(tools: Tools) -> None:
    """Names the first tool whose schema cannot be kept even alone, of those that the answer is held to; none if that
    takes longer than `CHECK_EACH_S`."""
    give_up = time.monotonic() + CHECK_EACH_S
    for index, tool in enumerate(tools.tools):
        if time.monotonic() > give_up:
            return
        is_held = tools.named in ("", tool.name) if tools.is_forced else tool.strict
        if is_held:
            try:
                check_grammar(Guided(json_schema=json.dumps(closed_schema(tool))))
            except ValueError as error:
                raise InvalidArgumentError(f"tools[{index}].parameters", str(error)) from error


def with_calls(sampling: Given, guided: Guided, name: FieldName) -> tuple[Given, FieldName]:
    """Sampling parameters of an answer whose form the tools give, and the client's names for them: a wrong form is
    the fault of the tools."""
    if sampling.get("guided") is not None:
        raise InvalidArgumentError(
            name("guided"), "cannot be together with a tool_choice that forces a call, or with strict tools"
        )
    return {**sampling, "guided": guided}, lambda given: "tools" if given == "guided" else name(given)


def reading_of(reading: Reading | None, guided: Guided | None) -> Reading | None:
    """How to read an answer whose form the client gives. It has no room for reasoning that the prompt began; if it is
    JSON or a choice, it has none for calls of tools either."""
    if reading is None or guided is None:
        return reading
    if guided.json_schema or guided.json_object or guided.choice:
        return None
    return replace(reading, parser=reading.fresh_parser)
