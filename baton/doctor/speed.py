"""What this machine's CPU reads and multiplies per second, in a second or two: the limits of decode and of prefill."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from engine.kernels.choice import TORCH, Choice
from engine.kernels.library import DTYPES, Kernels
from engine.layers import linear_kernel

_READ_BYTES = 256 << 20  # more than caches hold
ROWS, SIZE = 512, 2048  # a chunk of a prompt times a square weight
_REPETITIONS = 5


@dataclass(slots=True, frozen=True)
class CpuSpeed:
    """The best of a few repetitions each, so that what else runs counts little."""

    read_gb_s: float  # memory bandwidth, reading only
    kernels_gflop_s: float | None  # None if the kernels are not used
    torch_gflop_s: float
    kernels_read_gb_s: float | None = None  # of weights, in products with one token
    others_gflop_s: Mapping[str, float] = field(default_factory=dict)  # of other variants of the kernels


def measure_cpu(kernels: Choice, dtype: str, num_threads: int, others: Sequence[str] = ()) -> CpuSpeed:
    """Products of `dtype` with `num_threads`, also by the variants `others` of the kernels. The number of torch's own
    threads is the caller's to set. torch multiplies by a weight in the layout that engines give it."""
    own_kernels = None if kernels.instruction_set == TORCH else Kernels(kernels, num_threads)
    read_s, own_read_s = _read_s(own_kernels)
    torch_dtype: torch.dtype = getattr(torch, dtype)
    x, weight = torch.randn(ROWS, SIZE).to(torch_dtype), torch.randn(SIZE, SIZE).to(torch_dtype)

    def gflop_s(multiply: Callable[[torch.Tensor], torch.Tensor]) -> float:
        return 2 * ROWS * SIZE * SIZE / 1e9 / _best_s(lambda: multiply(x))

    own, rates = None, {}
    if own_kernels is not None and torch_dtype in DTYPES:
        own = gflop_s(own_kernels.pack(weight, None))
        for name in others:
            if name != kernels.instruction_set:
                rates[name] = gflop_s(Kernels(Choice(name, "a comparison"), num_threads).pack(weight, None))
    return CpuSpeed(
        read_gb_s=_READ_BYTES / 1e9 / read_s,
        kernels_gflop_s=own,
        torch_gflop_s=gflop_s(linear_kernel(weight, None)),
        kernels_read_gb_s=None if own_read_s is None else _READ_BYTES / 1e9 / own_read_s,
        others_gflop_s=rates,
    )


def _read_s(kernels: Kernels | None) -> tuple[float, float | None]:
    """Seconds to read `_READ_BYTES` once in the fastest way, and as the kernels do for a product with one token."""
    memory = torch.ones(_READ_BYTES // SIZE // 4, SIZE)
    if kernels is None:
        return _best_s(memory.sum), None
    packed, x = kernels.pack(memory, None), torch.ones(1, SIZE)
    own = _best_s(lambda: packed(x))
    return min(_best_s(memory.sum), own), own


def _best_s(work: Callable[[], object]) -> float:
    work()
    times = []
    for _ in range(_REPETITIONS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)
