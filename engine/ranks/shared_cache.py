"""A rank's KV cache in memory that other processes can map, so that rank 0's connectors read and write it."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Sequence

import torch


def make_cache_file() -> int:
    """A descriptor of memory for one cache; it has no size yet."""
    return os.memfd_create("baton-kv")


class SharedCache:
    """Memory for one tensor, of which several processes may ask for the same. It stays when `file` is closed."""

    def __init__(self, file: int) -> None:
        """`file` as `make_cache_file` gives it."""
        self._file = file

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Zeros, if nobody has written yet. All processes have to ask for the same shape."""
        os.ftruncate(self._file, max(1, math.prod(shape) * dtype.itemsize))
        return map_cache(self._file, shape, dtype)


def map_cache(file: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """The tensor that a `SharedCache` allocated."""
    num_elements = math.prod(shape)
    memory = mmap.mmap(file, max(1, num_elements * dtype.itemsize))
    return torch.frombuffer(memory, dtype=dtype, count=num_elements).view(*shape)
