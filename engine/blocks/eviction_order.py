"""The order in which cached blocks are evicted. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Iterator


class EvictionOrder:
    """Blocks that no request refers to and that can be found by name. Blocks that are not retained come first; among
    these, the block that requests gave up the longest ago."""

    def __init__(self) -> None:
        self._keys: dict[int, tuple[bool, int]] = {}  # by block: (whether retained, when it was given up)
        self._heap: list[tuple[tuple[bool, int], int]] = []  # may hold entries that are out of date
        self.num_retained = 0

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[int]:
        return iter(self._keys)

    def __contains__(self, block_id: object) -> bool:
        return block_id in self._keys

    def key(self, block_id: int) -> tuple[bool, int]:
        """(whether it is retained, when it was given up)."""
        return self._keys[block_id]

    def put(self, block_id: int, *, is_retained: bool, freed_at: int) -> None:
        """Adds a block, or gives it another place."""
        if len(self._heap) > 2 * len(self._keys) + 64:  # most entries are out of date
            self._heap = [(key, one) for one, key in self._keys.items()]
            heapq.heapify(self._heap)
        if block_id in self._keys:
            self.remove(block_id)
        self._keys[block_id] = key = is_retained, freed_at
        self.num_retained += is_retained
        heapq.heappush(self._heap, (key, block_id))

    def remove(self, block_id: int) -> None:
        is_retained, _ = self._keys.pop(block_id)
        self.num_retained -= is_retained

    def take_next(self) -> int:
        """Takes the next block out of the order. There must be one."""
        while True:
            key, block_id = heapq.heappop(self._heap)
            if self._keys.get(block_id) == key:
                self.remove(block_id)
                return block_id

    def clear(self) -> None:
        self._keys.clear()
        self._heap.clear()
        self.num_retained = 0

    def is_spare(self, block_id: int) -> bool:
        """Whether it is in the order and not retained."""
        return block_id in self._keys and not self._keys[block_id][0]
