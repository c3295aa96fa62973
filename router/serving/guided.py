"""Answers whose form the client or the tools prescribe: whether their grammar is valid."""

from __future__ import annotations

import json
import time
from functools import partial

from common.errors import InvalidArgumentError
from common.guided import Guided, check_grammar
from common.sampling import FieldName
from router.serving.threads import SHORT, TextThreads
from router.text.conversation import Tools
from router.text.forced_calls import closed_schema

MAX_GOOD_GRAMMARS = 64
CHECK_EACH_S = 0.5


class Grammars:
    """Parses grammars, in threads of its own: a costly one takes half a second, and should hold up no text."""

    def __init__(self, threads: TextThreads) -> None:
        self._threads = threads
        self._good: dict[Guided, None] = {}  # the last ones

    async def check(
        self, guided: Guided | None, name: FieldName, tools: Tools | None = None, form: Guided | None = None
    ) -> None:
        """`tools`: whose schemas are a part of `guided`. `form`: another part, the client's own, checked first so that
        an error has the words of what the client wrote. Raises `InvalidArgumentError`."""
        if guided is None or guided in self._good:
            return
        if form is not None:
            await self.check(form, name)
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
        if not tools.may_call(tool.name):
            continue
        is_held = tools.named in ("", tool.name) if tools.is_forced else tool.strict
        if is_held:
            try:
                check_grammar(Guided(json_schema=json.dumps(closed_schema(tool))))
            except ValueError as error:
                raise InvalidArgumentError(f"{tools.place(index)}.parameters", str(error)) from error
