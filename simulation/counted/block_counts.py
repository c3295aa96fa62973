"""A worker's KV blocks as counts, and its prefix cache as names. Pure.

What `engine.blocks` decides, without a block: empty ones are taken first, then cached ones, those that were given up
the longest ago before others. Of equal blocks one has the name.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class BlockCounts:
    def __init__(self, num_blocks: int, *, is_cached: bool) -> None:
        """`is_cached`: blocks have names and are found by them."""
        self.num_blocks = num_blocks
        self.num_owned = 0
        self.stored: list[bytes] = []  # names that became findable, and
        self.removed: list[bytes] = []  # names that were lost, since somebody took them
        self.is_cached = is_cached
        self._owners: dict[bytes, int] = {}  # by name: how many requests own the block
        self.idle: OrderedDict[bytes, None] = OrderedDict()  # names of those that nobody owns; evicted in this order

    @property
    def num_available(self) -> int:
        return self.num_blocks - self.num_owned

    @property
    def num_empty(self) -> int:
        return self.num_blocks - self.num_owned - len(self.idle)

    def __contains__(self, name: bytes) -> bool:
        return name in self._owners or name in self.idle

    def find(self, names: Sequence[bytes]) -> int:
        """How many of these leading blocks are here."""
        for number, name in enumerate(names):
            if name not in self._owners and name not in self.idle:
                return number
        return len(names)

    def allocate(self, num_blocks: int, shared: Sequence[bytes]) -> bool:
        """Takes so many blocks, those of `shared` among them. Returns False and changes nothing if there are too
        few."""
        num_revived = sum([name in self.idle for name in shared])
        if num_blocks - len(shared) > self.num_available - num_revived:
            return False
        for name in shared:
            self.share(name)
        self.take(num_blocks - len(shared))
        return True

    def share(self, name: bytes) -> None:
        """One more request owns a block that is here."""
        if name in self.idle:
            del self.idle[name]
            self._owners[name] = 1
            self.num_owned += 1
        else:
            self._owners[name] += 1

    def take(self, num_blocks: int) -> None:
        """Takes blocks without a name. Raises `ValueError` if there are too few."""
        self.num_owned += num_blocks
        if self.num_owned > self.num_blocks:
            raise ValueError(f"{self.num_owned} blocks are owned of {self.num_blocks}")
        for _ in range(self.num_owned + len(self.idle) - self.num_blocks):
            self.removed.append(self.idle.popitem(last=False)[0])

    def name(self, name: bytes) -> bool:
        """Names a block that is owned. Returns False and changes nothing if another one has the name."""
        if not self.is_cached or name in self._owners or name in self.idle:
            return False
        self._owners[name] = 1
        self.stored.append(name)
        return True

    def give_up(self, held: Sequence[bytes], num_unnamed: int) -> None:
        """A request gives up the blocks of these names, and others."""
        self.num_owned -= num_unnamed
        for name in reversed(held):
            left = self._owners[name] - 1
            if left:
                self._owners[name] = left
            else:
                del self._owners[name]
                self.idle[name] = None
                self.num_owned -= 1
