"""A rank's KV cache in memory that another process can map, so that rank 0's connectors read and write it."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Sequence

import torch


class SharedCache:
    """Memory for one tensor. `file` is its descriptor, for the process that maps the tensor, too; it is closed with
    `close`, and what was mapped stays."""

    def __init__(self) -> None:
        self.file = os.memfd_create("baton-kv")

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Zeros."""
        os.ftruncate(self.file, max(1, math.prod(shape) * dtype.itemsize))
        return map_cache(self.file, shape, dtype)

    def close(self) -> None:
        os.close(self.file)


def map_cache(file: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """The tensor that a `SharedCache` allocated."""
    num_elements = math.prod(shape)
    memory = mmap.mmap(file, max(1, num_elements * dtype.itemsize))
    return torch.frombuffer(memory, dtype=dtype, count=num_elements).view(*shape)
