"""What this machine's CPU reads and multiplies per second, in a second or two: the limits of decode and of prefill."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import linear

from engine.kernels.choice import TORCH, Choice
from engine.kernels.library import DTYPES, Kernels

_READ_BYTES = 256 << 20  # more than caches hold
ROWS, SIZE = 512, 2048  # a chunk of a prompt times a square weight
_REPETITIONS = 5


@dataclass(slots=True, frozen=True)
class CpuSpeed:
    """The best of a few repetitions each, so that what else runs counts little."""

    read_gb_s: float  # memory bandwidth, reading only
    kernels_gflop_s: float | None  # None if the kernels are not used
    torch_gflop_s: float


def measure_cpu(kernels: Choice, dtype: str, num_threads: int) -> CpuSpeed:
    """Products of `dtype` with `num_threads`. The number of torch's own threads is the caller's to set."""
    own_kernels = None if kernels.instruction_set == TORCH else Kernels(kernels, num_threads)
    read_s = _read_s(own_kernels)
    torch_dtype: torch.dtype = getattr(torch, dtype)
    x, weight = torch.randn(ROWS, SIZE).to(torch_dtype), torch.randn(SIZE, SIZE).to(torch_dtype)
    gflop = 2 * ROWS * SIZE * SIZE / 1e9
    own = None
    if own_kernels is not None and torch_dtype in DTYPES:
        packed = own_kernels.pack(weight, None)
        own = gflop / _best_s(lambda: packed(x))
    return CpuSpeed(_READ_BYTES / 1e9 / read_s, own, gflop / _best_s(lambda: linear(x, weight)))


def _read_s(kernels: Kernels | None) -> float:
    """Seconds to read `_READ_BYTES` once, as a product with one token does."""
    memory = torch.ones(_READ_BYTES // SIZE // 4, SIZE)
    if kernels is None:
        return _best_s(memory.sum)
    packed, x = kernels.pack(memory, None), torch.ones(1, SIZE)
    return min(_best_s(memory.sum), _best_s(lambda: packed(x)))


def _best_s(work: Callable[[], object]) -> float:
    work()
    times = []
    for _ in range(_REPETITIONS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)
