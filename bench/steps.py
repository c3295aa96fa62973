"""The pace of a worker without an engine."""

from __future__ import annotations

import asyncio


class Steps:
    """All answers get their next token at the same moment, as of an engine, every `step_s` seconds from now on."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._began: float | None = None
        self._num = 0  # of the step that is due next, or was due last; none is due twice, however coarse the clock is
        self._next: asyncio.Future[None] | None = None  # if anybody waits for it

    async def next(self) -> None:
        if self._next is None:
            loop = asyncio.get_running_loop()
            self._next = loop.create_future()
            now = loop.time()
            if self._began is None:
                self._began = now
            self._num = max(self._num, int((now - self._began) // self._step_s)) + 1
            loop.call_at(self._began + self._num * self._step_s, self._end)
        await asyncio.shield(self._next)

    def _end(self) -> None:
        step, self._next = self._next, None
        if step is not None:
            step.set_result(None)
