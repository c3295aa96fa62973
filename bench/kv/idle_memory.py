"""A control without Baton: what reading memory costs on this machine that nobody has read for some time.

The first decode step after a long prompt reads the KV and the weights that have lain idle while the prompt was
computed. Some machines take such memory away or age it meanwhile: virtual ones whose host shares it out, for instance.
"""

from __future__ import annotations

import mmap
import statistics
import time

import numpy as np

NUM_READS = 8


def idle_memory_ms(num_bytes: int, idle_s: float) -> float:
    """Milliseconds that the first read of `num_bytes`, in huge pages where there are some, takes longer after `idle_s`
    than the median of those right after it. Below zero where it was a fast one."""
    with mmap.mmap(-1, num_bytes) as memory:
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        words = np.frombuffer(memory, dtype=np.int64, count=num_bytes // 8)
        words[:] = 1
        _read_ms(words)
        time.sleep(idle_s)
        first, *others = [_read_ms(words) for _ in range(NUM_READS)]
        del words  # a view keeps the map from being closed
    return first - statistics.median(others)


def _read_ms(words: np.ndarray[tuple[int], np.dtype[np.int64]]) -> float:
    start = time.perf_counter()
    words.sum()
    return (time.perf_counter() - start) * 1000
