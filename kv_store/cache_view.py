"""One worker's KV cache as rows of bytes, one row per block, for code that moves blocks through host memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from common.types import KVCacheSpec

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class CacheView:
    """Bytes of `cache`, contiguous `[num_blocks, *spec.block_shape]` of `spec.dtype` on any device.

    Raises `ValueError` where tensor and spec disagree, which is a defect of the caller.
    """

    def __init__(self, cache: torch.Tensor, spec: KVCacheSpec) -> None:
        if not cache.is_contiguous() or tuple(cache.shape[1:]) != spec.block_shape:
            raise ValueError(f"cache {tuple(cache.shape)} is not contiguous [num_blocks, *{spec.block_shape}]")
        if cache.dtype != _DTYPES[spec.dtype]:
            raise ValueError(f"cache is {cache.dtype}, its spec says {spec.dtype}")
        self.num_blocks = cache.shape[0]
        self.block_bytes = spec.block_bytes
        self.device = cache.device
        # [num_blocks, block_bytes] uint8, the cache's own memory
        self.rows = cache.detach().view(-1).view(torch.uint8).view(self.num_blocks, self.block_bytes)
        # the same as [num_blocks, num_layers * 2, num_kv_heads, bytes of a head]
        self.heads = self.rows.view(self.num_blocks, spec.num_layers * 2, spec.num_kv_heads, -1)

    @property
    def is_on_host(self) -> bool:
        return self.device.type == "cpu"

    def mark(self) -> torch.cuda.Event | None:
        """The device work queued so far on the caller's stream, to be waited for before a block's bytes are touched
        from another thread. None on CPU, where nothing is queued. Does not wait."""
        if self.is_on_host:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event


class Staging:
    """One thread's way to blocks as host memory: the cache itself on CPU, a pinned buffer and a stream on CUDA."""

    def __init__(self, view: CacheView, max_blocks: int) -> None:
        self._view = view
        self._stream: torch.cuda.Stream | None = None
        self._rows = view.rows
        if not view.is_on_host:
            self._stream = torch.cuda.Stream(view.device)  # type: ignore[no-untyped-call]
            self._rows = torch.empty((max_blocks, view.block_bytes), dtype=torch.uint8, pin_memory=True)
        self._memory = self._rows.numpy()

    def buffers(self, block_ids: Sequence[int]) -> list[memoryview]:
        """Writable host memory, `block_bytes` each, for at most `max_blocks` blocks. On CUDA the next call of any
        method but `store` reuses it."""
        rows = block_ids if self._stream is None else range(len(block_ids))
        return [self._memory[row].data for row in rows]

    def load(self, block_ids: Sequence[int], after: torch.cuda.Event | None) -> list[memoryview]:
        """The blocks' bytes, as they are once `after` has happened."""
        if self._stream is not None:
            with torch.cuda.stream(self._stream):
                if after is not None:
                    self._stream.wait_event(after)
                for row, block_id in enumerate(block_ids):
                    self._rows[row].copy_(self._view.rows[block_id], non_blocking=True)
            self._stream.synchronize()
        return self.buffers(block_ids)

    def store(self, block_ids: Sequence[int], is_good: Sequence[bool], after: torch.cuda.Event | None) -> None:
        """Brings what was written to `buffers(block_ids)` into the cache, where `is_good`. Waits until it is there."""
        if self._stream is None:
            return
        with torch.cuda.stream(self._stream):
            if after is not None:
                self._stream.wait_event(after)
            for row, block_id in enumerate(block_ids):
                if is_good[row]:
                    self._view.rows[block_id].copy_(self._rows[row], non_blocking=True)
        self._stream.synchronize()
