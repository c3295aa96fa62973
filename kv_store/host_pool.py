"""Host memory that stands in for a cache which a transport cannot reach: blocks are copied from it or into it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kv_store.cache_view import CacheView
from kv_store.host_pages import prepare_pages


class HostPool:
    """`num_slots` blocks of host memory, pinned where the cache is on a device. For one thread."""

    def __init__(self, view: CacheView, num_slots: int) -> None:
        """Raises `RuntimeError` where there is not enough memory."""
        self._view = view
        self.num_slots = num_slots
        is_pinned = not view.is_on_host
        # [num_slots, block_bytes] uint8
        self.rows = torch.empty((num_slots, view.block_bytes), dtype=torch.uint8, pin_memory=is_pinned)
        prepare_pages(self.rows)
        self.memory = self.rows.numpy()
        self._stream = torch.cuda.Stream(view.device) if is_pinned else None  # type: ignore[no-untyped-call]

    def load(self, block_ids: Sequence[int], slots: Sequence[int], after: torch.cuda.Event | None) -> None:
        """Cache to pool, as the blocks are once `after` has happened. Waits until it is done."""
        pairs = [(self.rows[slot], self._view.rows[block_id]) for slot, block_id in zip(slots, block_ids, strict=True)]
        self._copy(pairs, after)

    def store(self, slots: Sequence[int], block_ids: Sequence[int], after: torch.cuda.Event | None) -> None:
        """Pool to cache, after `after`. Waits until it is done."""
        pairs = [(self._view.rows[block_id], self.rows[slot]) for slot, block_id in zip(slots, block_ids, strict=True)]
        self._copy(pairs, after)

    def _copy(self, pairs: list[tuple[torch.Tensor, torch.Tensor]], after: torch.cuda.Event | None) -> None:
        if self._stream is None:
            for target, source in pairs:
                target.copy_(source)
            return
        with torch.cuda.stream(self._stream):
            if after is not None:
                self._stream.wait_event(after)
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        self._stream.synchronize()
