"""One worker's KV cache as rows of bytes, one row per block, for code that moves blocks through host memory."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from common.types import KVCacheSpec

if TYPE_CHECKING:
    import torch  # a simulated device's cache is an array, and its process has no torch unless a transport needs it

    from kv_store.base import KVCache


class CacheView:
    """Bytes of `cache`, contiguous `[num_blocks, *spec.block_shape]` of `spec.dtype` on any device.

    Raises `ValueError` if cache and spec disagree, which is a defect of the caller.
    """

    def __init__(self, cache: KVCache, spec: KVCacheSpec) -> None:
        is_contiguous = cache.flags.c_contiguous if isinstance(cache, np.ndarray) else cache.is_contiguous()
        if not is_contiguous or tuple(cache.shape[1:]) != spec.block_shape:
            raise ValueError(f"cache {tuple(cache.shape)} is not contiguous [num_blocks, *{spec.block_shape}]")
        dtype = str(cache.dtype).removeprefix("torch.")
        if dtype != spec.dtype:
            raise ValueError(f"cache is {dtype}, its spec says {spec.dtype}")
        self._cache = cache
        self._spec = spec
        self.num_blocks = cache.shape[0]
        self.block_bytes = spec.block_bytes
        self.is_on_host = isinstance(cache, np.ndarray) or cache.device.type == "cpu"

    @cached_property
    def rows(self) -> torch.Tensor:
        """`[num_blocks, block_bytes]` uint8, the cache's own memory."""
        import torch

        cache = torch.from_numpy(self._cache) if isinstance(self._cache, np.ndarray) else self._cache.detach()
        return cache.view(-1).view(torch.uint8).view(self.num_blocks, self.block_bytes)

    @cached_property
    def heads(self) -> torch.Tensor:
        """The same as `[num_blocks, num_layers * num_planes, num_kv_heads, bytes of a head]`."""
        spec = self._spec
        return self.rows.view(self.num_blocks, spec.num_layers * spec.num_planes, spec.num_kv_heads, -1)

    @cached_property
    def memory(self) -> npt.NDArray[np.uint8]:
        """`rows` of a cache that `is_on_host`."""
        if isinstance(self._cache, np.ndarray):
            return self._cache.reshape(-1).view(np.uint8).reshape(self.num_blocks, self.block_bytes)
        memory: npt.NDArray[np.uint8] = self.rows.numpy()
        return memory

    @property
    def device(self) -> torch.device:
        return self.rows.device

    def mark(self) -> torch.cuda.Event | None:
        """The device work queued so far on the caller's stream, to be waited for before a block's bytes are touched
        from another thread. None on CPU, where nothing is queued. Does not wait."""
        if self.is_on_host:
            return None
        import torch

        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event
