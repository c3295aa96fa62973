"""Blocks of host memory: a cache below the device's, and where swapped requests wait. Pure bookkeeping.

A host block is in exactly one of three states:

    empty    holds nothing
    cached   holds a copy of a named block; the one that was used the longest ago makes room, a retained one
             (`Retention`) only if no other is left
    owned    by a swapped request, or for the moment by an allocation that copies it up

One pool serves both uses: what is cached gives way to what is swapped, and the rest of the pool is never idle.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, KeysView


class HostBlocks:
    def __init__(self, num_blocks: int, is_retained: Callable[[bytes], bool]) -> None:
        self.num_blocks = num_blocks
        self._empty = deque(range(num_blocks))
        self._cached: dict[bytes, int] = {}  # name: host block
        self._is_retained = is_retained
        self._first: OrderedDict[bytes, None] = OrderedDict()  # names, the next to make room first
        self._last: OrderedDict[bytes, None] = OrderedDict()  # the same of those that are retained

    def __contains__(self, name: bytes) -> bool:
        return name in self._cached

    @property
    def num_available_blocks(self) -> int:
        """Blocks that `take` could give."""
        return len(self._empty) + len(self._cached)

    def names(self) -> KeysView[bytes]:
        return self._cached.keys()

    def touch(self, name: bytes) -> None:
        """The copy was asked for again."""
        self.reorder(name)

    def reorder(self, name: bytes) -> None:
        """Whether the name is retained has changed."""
        if name in self._cached:
            self._forget(name)
            self._queue(name)

    def take(self, *, spare_retained: bool = False) -> tuple[int, bytes | None] | None:
        """(a block that the caller owns now, the name that was evicted for it). None if every block is owned, or
        retained and to be spared."""
        if self._empty:
            return self._empty.popleft(), None
        if self._first or (self._last and not spare_retained):
            name = next(iter(self._first or self._last))
            return self.take_named(name), name
        return None

    def take_named(self, name: bytes) -> int:
        """The block that holds `name`, owned by the caller."""
        self._forget(name)
        return self._cached.pop(name)

    def keep(self, name: bytes, host_block: int) -> None:
        """Makes an owned block findable by what it holds."""
        self._cached[name] = host_block
        self._queue(name)

    def free(self, host_blocks: Iterable[int]) -> None:
        """Gives owned blocks back; what they hold is not kept."""
        self._empty.extend(host_blocks)

    def clear(self) -> None:
        """Forgets every name."""
        self._empty.extend(self._cached.values())
        self._cached.clear()
        self._first.clear()
        self._last.clear()

    def _queue(self, name: bytes) -> None:
        (self._last if self._is_retained(name) else self._first)[name] = None

    def _forget(self, name: bytes) -> None:
        self._first.pop(name, None)
        self._last.pop(name, None)

    def check_integrity(self, used: Counter[int]) -> list[str]:
        """What is wrong, given the blocks that requests own."""
        free = Counter([*self._empty, *self._cached.values()])
        if Counter([*self._first, *self._last]) != Counter(self._cached.keys()):
            return ["cached host blocks are not those that are in line to make room"]
        return [
            f"host block {host_block} has {free[host_block] + used[host_block]} owners"
            for host_block in range(self.num_blocks)
            if free[host_block] + used[host_block] != 1
        ]
