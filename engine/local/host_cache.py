"""Host memory for KV blocks: what the device evicts, and what swapped requests leave."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch

from common.config import EngineSettings
from common.errors import StartupError
from common.types import KVCacheSpec
from engine.blocks.host_tier import BlockCopy
from engine.local.host_memory import GIB, available_bytes, host_cache_gb, num_host_blocks
from kv_store.host_pages import prepare_pages


def allocate_host_cache(
    settings: EngineSettings, spec: KVCacheSpec, device: torch.device, num_caches: int = 1
) -> torch.Tensor:
    """`[num_host_blocks, *block_shape]` of the cache's dtype, for both uses together; no blocks if neither is on.

    Page-locked if `device` is CUDA, so that copies run beside computing. Raises `StartupError` if memory does not
    suffice for so many of them: pages are made later, so what is left does not show those that others get.
    """
    num_blocks = num_host_blocks(settings, spec.block_bytes)
    available = available_bytes()
    if num_blocks and available is not None and num_caches * num_blocks * spec.block_bytes > available:
        raise StartupError(
            f"{num_caches * host_cache_gb(settings):.2f} GiB of host memory for KV blocks, "
            f"{available / GIB:.2f} GiB are available; lower --host-cache-gb or --swap-space-gb"
        )
    cache = torch.empty((num_blocks, *spec.block_shape), dtype=getattr(torch, spec.dtype))
    if num_blocks and device.type == "cuda":
        _page_lock(cache)
    else:
        prepare_pages(cache)
    return cache


def copy_blocks(copies: Iterable[BlockCopy], device_cache: torch.Tensor, host_cache: torch.Tensor) -> None:
    """Copies whole blocks in the order given: one copy may read a block that a later copy fills. On CUDA this only
    queues the copies, and device work that uses the blocks has to be queued after them."""
    for copy in copies:
        on_device, on_host = device_cache[copy.device_block], host_cache[copy.host_block]
        if copy.to_host:
            on_host.copy_(on_device, non_blocking=True)
        else:
            on_device.copy_(on_host, non_blocking=True)


def _page_lock(cache: torch.Tensor) -> None:
    """Page-locks existing memory: an allocation with `pin_memory` would round up to a power of two."""
    cuda = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address = cache.data_ptr()
    code = int(cuda.cudaHostRegister(address, cache.nbytes, 0))
    if code:
        raise StartupError(
            f"cannot lock {cache.nbytes / GIB:.2f} GiB of host memory for KV blocks (CUDA error {code}); "
            "lower --host-cache-gb or --swap-space-gb, or raise the limit of locked memory"
        )
    weakref.finalize(cache, cuda.cudaHostUnregister, address).atexit = False
