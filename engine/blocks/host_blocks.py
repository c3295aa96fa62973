"""Blocks of host memory: a cache below the device's, and where swapped requests wait. Pure bookkeeping.

A host block is in exactly one of three states:

    empty    holds nothing
    cached   holds a copy of a named block; the one that was used the longest ago makes room
    owned    by a swapped request, or for the moment by an allocation that copies it up

One pool serves both uses: what is cached gives way to what is swapped, and the rest of the pool is never idle.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, KeysView


class HostBlocks:
    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._empty = deque(range(num_blocks))
        self._cached: OrderedDict[bytes, int] = OrderedDict()  # name: host block, the next to make room first

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
        self._cached.move_to_end(name)

    def take(self) -> tuple[int, bytes | None] | None:
        """A block, owned by the caller, and the name that made room for it; None if all are owned."""
        if self._empty:
            return self._empty.popleft(), None
        if self._cached:
            name, host_block = self._cached.popitem(last=False)
            return host_block, name
        return None

    def take_named(self, name: bytes) -> int:
        """The block that holds `name`, owned by the caller."""
        return self._cached.pop(name)

    def keep(self, name: bytes, host_block: int) -> None:
        """Makes an owned block findable by what it holds."""
        self._cached[name] = host_block

    def free(self, host_blocks: Iterable[int]) -> None:
        """Gives owned blocks back; what they hold is not kept."""
        self._empty.extend(host_blocks)

    def clear(self) -> None:
        """Forgets every name."""
        self._empty.extend(self._cached.values())
        self._cached.clear()

    def check_integrity(self, used: Counter[int]) -> list[str]:
        """What is wrong, given the blocks that requests own."""
        free = Counter([*self._empty, *self._cached.values()])
        return [
            f"host block {host_block} has {free[host_block] + used[host_block]} owners"
            for host_block in range(self.num_blocks)
            if free[host_block] + used[host_block] != 1
        ]
