"""Tells routers of this worker's KV blocks: a list of all names, then changes in order.

    engine ── BlocksChanged ──> recent changes, numbered, up to `MAX_RECENT_BYTES` ──> each watcher at its own pace
           <── GetBlocks ── a watcher that is new, or so late that its next change is gone
           ── BlocksListed ──> all names, shared by all who wait for it; after it the watcher goes on with changes

Nothing is kept for single watchers, so one that reads slowly costs no memory: it gets a new list.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass

from common.block_hash import HASH_BYTES
from common.errors import OverloadedError, UnavailableError

MAX_RECENT_BYTES = 2**20
CHANGE_BYTES = 256  # of a change without its names: small changes are what a worker has most of
PIECE_NAMES = 2**12  # in one message: 64 KiB, milliseconds of a router that takes them in
MAX_WATCHERS = 64
LIST_TIMEOUT_S = 60.0  # an engine answers between two steps


@dataclass(slots=True, frozen=True)
class BlockChange:
    """`sequence` grows by one with each change; pieces of a list have that of the last change in the list."""

    sequence: int
    stored: bytes = b""
    removed: bytes = b""
    starts_list: bool = False

    @property
    def num_bytes(self) -> int:
        """Memory that it takes, about."""
        return CHANGE_BYTES + len(self.stored) + len(self.removed)


class BlockFeed:
    """`ask_list` asks the engine for all names; it answers by `listed`."""

    def __init__(
        self,
        ask_list: Callable[[], None],
        *,
        max_recent_bytes: int = MAX_RECENT_BYTES,
        piece_names: int = PIECE_NAMES,
        max_watchers: int = MAX_WATCHERS,
        list_timeout_s: float = LIST_TIMEOUT_S,
    ) -> None:
        self._ask_list = ask_list
        self._max_recent_bytes = max_recent_bytes
        self._piece_names = piece_names
        self._max_watchers = max_watchers
        self._list_timeout_s = list_timeout_s
        self._recent: deque[BlockChange] = deque()
        self._num_recent_bytes = 0
        self._sequence = 0
        self._num_watchers = 0
        self._list: asyncio.Future[tuple[int, bytes]] | None = None  # asked for and not here yet
        self._news = asyncio.Event()

    def changed(self, stored: bytes, removed: bytes) -> None:
        self._sequence += 1
        change = BlockChange(self._sequence, stored, removed)
        self._recent.append(change)
        self._num_recent_bytes += change.num_bytes
        while self._num_recent_bytes > self._max_recent_bytes and self._recent:
            self._num_recent_bytes -= self._recent.popleft().num_bytes
        self._news.set()
        self._news.clear()

    def listed(self, names: bytes) -> None:
        if self._list is not None and not self._list.done():
            self._list.set_result((self._sequence, names))
        self._list = None

    async def watch(self, sequence: int | None) -> AsyncGenerator[BlockChange, None]:
        """Yields the changes after `sequence`, for ever. Begins with a list if `sequence` is None, unknown, or too long
        ago.

        Raises `OverloadedError` if too many watch, `UnavailableError` if the engine does not answer.
        """
        with self._watcher():
            while True:
                if sequence is None or not self._is_covered(sequence):
                    sequence, names = await self._all_names()
                    for piece in _pieces(sequence, names, self._piece_names):
                        yield piece
                elif sequence == self._sequence:
                    await self._news.wait()
                else:
                    change = self._recent[sequence + 1 - self._recent[0].sequence]
                    sequence = change.sequence
                    yield change

    @contextlib.contextmanager
    def _watcher(self) -> Iterator[None]:
        if self._num_watchers >= self._max_watchers:
            raise OverloadedError(f"{self._max_watchers} streams of blocks are open")
        self._num_watchers += 1
        try:
            yield
        finally:
            self._num_watchers -= 1

    def _is_covered(self, sequence: int) -> bool:
        """Whether all changes after `sequence` are here."""
        if sequence > self._sequence:
            return False
        return sequence == self._sequence or (bool(self._recent) and self._recent[0].sequence <= sequence + 1)

    async def _all_names(self) -> tuple[int, bytes]:
        """(number of the last change that the names include, names). Callers that ask at the same time share one
        answer of the engine."""
        if self._list is None:
            self._ask_list()
            self._list = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(self._list_timeout_s):
                return await asyncio.shield(self._list)
        except TimeoutError:
            raise UnavailableError(f"the engine listed no blocks within {self._list_timeout_s:g} s") from None


def _pieces(sequence: int, names: bytes, num_names: int) -> Iterator[BlockChange]:
    size = num_names * HASH_BYTES
    for start in range(0, max(len(names), 1), size):
        yield BlockChange(sequence, names[start : start + size], starts_list=start == 0)
