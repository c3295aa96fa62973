"""One worker's KV cache as rows of bytes, one row per block, for code that moves blocks through host memory."""

from __future__ import annotations

import torch

from common.types import KVCacheSpec

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class CacheView:
    """Bytes of `cache`, contiguous `[num_blocks, *spec.block_shape]` of `spec.dtype` on any device.

    Raises `ValueError` if tensor and spec disagree, which is a defect of the caller.
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
        # the same as [num_blocks, num_layers * num_planes, num_kv_heads, bytes of a head]
        self.heads = self.rows.view(self.num_blocks, spec.num_layers * spec.num_planes, spec.num_kv_heads, -1)

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
