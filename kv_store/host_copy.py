"""Host memory for a cache's blocks, for code that moves bytes and for transports that reach only host memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kv_store.cache_view import CacheView
from kv_store.host_pages import prepare_pages

if TYPE_CHECKING:
    import torch


class HostCopy:
    """`num_slots` blocks of host memory beside the cache; pinned, with a stream of its own, if the cache is on a
    device.

    A cache in host memory is its own copy, and nothing is copied, unless `is_apart`. For one thread at a time. Without
    `slots`, a call uses the first slots and overwrites what the previous call left there.
    """

    def __init__(self, view: CacheView, num_slots: int, *, is_apart: bool = False) -> None:
        """Raises `RuntimeError` if there is not enough memory."""
        self._view = view
        self._is_cache = view.is_on_host and not is_apart
        self.num_slots = num_slots
        self._stream: torch.cuda.Stream | None = None
        if self._is_cache:
            self.memory = view.memory
            return
        import torch  # not for a cache that is its own copy: a simulated device's process has no torch

        if view.is_on_host:
            rows = torch.empty((num_slots, view.block_bytes), dtype=torch.uint8)
            prepare_pages(rows)
        else:
            rows = torch.empty((num_slots, view.block_bytes), dtype=torch.uint8, pin_memory=True)
            self._stream = torch.cuda.Stream(view.device)  # type: ignore[no-untyped-call]
        self._rows = rows
        self.memory = rows.numpy()

    @property
    def rows(self) -> torch.Tensor:
        """`[num_slots, block_bytes]` uint8."""
        return self._view.rows if self._is_cache else self._rows

    def buffers(self, block_ids: Sequence[int], slots: Sequence[int] | None = None) -> list[memoryview]:
        """Writable host memory of each block, `block_bytes` long. `store` brings it into the cache."""
        return [self.memory[slot].data for slot in self._slots(block_ids, slots)]

    def load(
        self, block_ids: Sequence[int], after: torch.cuda.Event | None, slots: Sequence[int] | None = None
    ) -> list[memoryview]:
        """Returns the blocks' bytes once `after` has happened and they are in host memory. Waits for both."""
        if not self._is_cache:
            pairs = zip(self._slots(block_ids, slots), block_ids, strict=True)
            self._copy([(self.rows[slot], self._view.rows[block_id]) for slot, block_id in pairs], after)
        return self.buffers(block_ids, slots)

    def store(
        self,
        block_ids: Sequence[int],
        is_good: Sequence[bool],
        after: torch.cuda.Event | None,
        slots: Sequence[int] | None = None,
    ) -> None:
        """Copies each block that `is_good` from the buffers into the cache, after `after`. Waits until that is done."""
        if not self._is_cache:
            triples = zip(self._slots(block_ids, slots), block_ids, is_good, strict=True)
            self._copy(
                [(self._view.rows[block_id], self.rows[slot]) for slot, block_id, good in triples if good], after
            )

    def _slots(self, block_ids: Sequence[int], slots: Sequence[int] | None) -> Sequence[int]:
        if self._is_cache:
            return block_ids
        return range(len(block_ids)) if slots is None else slots

    def _copy(self, pairs: list[tuple[torch.Tensor, torch.Tensor]], after: torch.cuda.Event | None) -> None:
        if self._stream is None:
            for target, source in pairs:
                target.copy_(source)
            return
        import torch

        with torch.cuda.stream(self._stream):
            if after is not None:
                self._stream.wait_event(after)
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        self._stream.synchronize()
