"""Questions to the engine that have one answer each."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable

from common.errors import UnavailableError
from engine import messages as m

ANSWER_TIMEOUT_S = 10.0
TRACE_TIMEOUT_S = 60.0  # to write a trace


class EngineCalls:
    def __init__(self, send: Callable[[m.Command], None]) -> None:
        self._send = send
        self._numbers = itertools.count(1)
        self._asked: tuple[int, asyncio.Future[m.Status]] | None = None  # the status call under way
        self._asked_next: asyncio.Future[m.Status] | None = None  # whose callers came after it had begun
        self._hints: dict[int, asyncio.Future[m.CacheHinted]] = {}  # by call id: calls under way
        self._profiles: dict[int, asyncio.Future[m.StepsProfiled]] = {}  # likewise

    def answered(self, event: m.Status | m.CacheHinted | m.StepsProfiled) -> None:
        match event:
            case m.Status():
                self._take_in_status(event)
            case m.CacheHinted(call_id=call_id):
                if (future := self._hints.get(call_id)) and not future.done():
                    future.set_result(event)
            case m.StepsProfiled(call_id=call_id):
                if (profiled := self._profiles.get(call_id)) and not profiled.done():
                    profiled.set_result(event)

    async def status(self) -> m.Status:
        """Load and integrity between two steps, as of after this call. Raises `UnavailableError` if no answer comes.

        The engine is asked once at a time, however many ask: those who come meanwhile share the next answer.
        """
        if self._asked is None:
            self._ask_status(asyncio.get_running_loop().create_future())
        elif self._asked_next is None:
            self._asked_next = asyncio.get_running_loop().create_future()
        future = self._asked_next or self._asked[1]  # type: ignore[index] # set by `_ask_status`
        try:
            # Shielded: others wait for it, and a caller may go away at any time.
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                return await asyncio.shield(future)
        except TimeoutError:
            raise UnavailableError(f"the engine gave no status within {ANSWER_TIMEOUT_S:.0f} s") from None

    def _ask_status(self, future: asyncio.Future[m.Status]) -> None:
        call_id = next(self._numbers)
        self._send(m.GetStatus(call_id))
        self._asked, self._asked_next = (call_id, future), None

    def _take_in_status(self, status: m.Status) -> None:
        if self._asked is None or self._asked[0] != status.call_id:
            return
        self._asked[1].set_result(status)
        self._asked = None
        if self._asked_next is not None:
            self._ask_status(self._asked_next)

    async def hint_cache(
        self, action: m.CacheAction, block_hashes: list[bytes], *, tenant: str, seconds: float
    ) -> m.CacheHinted:
        """Raises `UnavailableError` if no answer comes."""
        call_id = next(self._numbers)
        future: asyncio.Future[m.CacheHinted] = asyncio.get_running_loop().create_future()
        self._hints[call_id] = future
        try:
            self._send(
                m.HintCache(call_id=call_id, action=action, block_hashes=block_hashes, tenant=tenant, seconds=seconds)
            )
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                return await future
        except TimeoutError:
            raise UnavailableError(f"the engine gave no answer within {ANSWER_TIMEOUT_S:.0f} s") from None
        finally:
            del self._hints[call_id]

    async def flush_cache(self) -> m.CacheHinted:
        """Raises `UnavailableError` if no answer comes."""
        return await self.hint_cache(m.CacheAction.FLUSH, [], tenant="", seconds=0.0)

    async def profile(self, num_steps: int, timeout_s: float, path: str) -> m.StepsProfiled:
        """Has a trace of the next steps written to `path`. Raises `UnavailableError` if no answer comes."""
        call_id = next(self._numbers)
        future: asyncio.Future[m.StepsProfiled] = asyncio.get_running_loop().create_future()
        self._profiles[call_id] = future
        self._send(m.ProfileSteps(call_id=call_id, num_steps=num_steps, timeout_s=timeout_s, path=path))
        try:
            async with asyncio.timeout(timeout_s + TRACE_TIMEOUT_S):
                return await future
        except TimeoutError:
            raise UnavailableError(f"the engine gave no trace within {timeout_s + TRACE_TIMEOUT_S:.0f} s") from None
        finally:
            del self._profiles[call_id]
            if not future.done() or future.cancelled():
                self._end_profile()

    def _end_profile(self) -> None:
        with contextlib.suppress(UnavailableError):  # it has ended meanwhile
            self._send(m.EndProfile())
