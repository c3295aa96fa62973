"""Answers whose form the client or the tools prescribe: whether their grammar is valid."""

from __future__ import annotations

import time
from functools import partial

from common import metrics
from common.errors import InvalidArgumentError, OverloadedError
from common.grammar_process import GrammarProcess, shared_process
from common.guided import Guided, json_text
from common.sampling import FieldName
from router.limits.clients import ApiClient
from router.running.threads import SHORT, TextThreads
from text.conversation import Tools
from text.forced_calls import closed_schema

MAX_KNOWN_GRAMMARS = 64
CHECK_EACH_S = 0.5
MAX_WAIT_S = 10.0  # for others' grammars; each of them takes two seconds at most


class Grammars:
    """Checks grammars in a process of their own, which they may cost: `common.grammar_process`. Threads wait for it, so
    that nothing else does."""

    def __init__(self, threads: TextThreads, process: GrammarProcess | None = None) -> None:
        self._threads = threads
        self._process = process or shared_process()
        self._known: dict[Guided, str] = {}  # the last ones, and what is wrong with each

    async def check(
        self,
        guided: Guided,
        name: FieldName,
        tools: Tools | None = None,
        form: Guided | None = None,
        client: ApiClient | None = None,
    ) -> None:
        """`tools`: whose schemas are a part of `guided`. `form`: another part, the client's own, checked first so that
        an error has the words of what the client wrote. `client`: whose turn it takes.

        Raises `InvalidArgumentError`, and `OverloadedError` if others' grammars took all the time that this one may
        wait."""
        if form is not None:
            await self.check(form, name, client=client)
        if (reason := self._known.get(guided)) is None:
            begin_by = time.monotonic() + MAX_WAIT_S
            reason = await self._threads.run(SHORT + 1, partial(self._reason, guided, begin_by), client)
            self._known[guided] = reason
            while len(self._known) > MAX_KNOWN_GRAMMARS:
                del self._known[next(iter(self._known))]
        if not reason:
            return
        if tools is not None:
            await self._threads.run(SHORT + 1, partial(self._blame_one, tools), client)
        raise InvalidArgumentError(name("guided"), reason)

    def _reason(self, guided: Guided, begin_by: float) -> str:
        """What is wrong with it; empty if nothing is."""
        if time.monotonic() > begin_by:
            metrics.router_refused.labels("grammars").inc()
            raise OverloadedError("others' grammars are being parsed, try again later")
        try:
            self._process.check(guided)
        except ValueError as error:
            return str(error)
        return ""

    def _blame_one(self, tools: Tools) -> None:
        """Names the first tool whose schema cannot be kept even alone, of those that the answer is held to; none if
        that takes longer than `CHECK_EACH_S`."""
        give_up = time.monotonic() + CHECK_EACH_S
        for index, tool in enumerate(tools.tools):
            if time.monotonic() > give_up:
                return
            if not tools.may_call(tool.name):
                continue
            is_held = tools.named in ("", tool.name) if tools.is_forced else tool.strict
            if is_held:
                try:
                    self._process.check(Guided(json_schema=json_text(closed_schema(tool))))
                except ValueError as error:
                    raise InvalidArgumentError(tools.schema_place(index), str(error)) from error
