"""Finds from how many tokens on torch's library multiplies faster than the kernels, by size of the weight."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from engine.kernels.choice import Choice
from engine.kernels.library import DTYPES, Kernels
from engine.kernels.table import Rule
from engine.layers import linear_kernel

SHAPES = ((1024, 512), (2048, 2048), (8192, 2048))  # smallest first: [out_features, in_features]
ROWS = (1, 8, 32, 128, 512)
_REPETITIONS = 5
_LONG_S = 1.0  # after which there is no other repetition
GAIN = 1.1  # so much faster has torch to be: a weight that both multiply by lies in memory twice


@dataclass(slots=True, frozen=True)
class Measured:
    """The best of a few repetitions that took turns."""

    dtype: str
    out_features: int
    in_features: int
    rows: int
    kernels_ms: float
    torch_ms: float


def measure_products(choice: Choice, num_threads: int) -> Iterator[Measured]:
    """Some half a minute. The number of torch's own threads is the caller's to set."""
    kernels = Kernels(choice, num_threads)
    for dtype in DTYPES:
        for n, k in SHAPES:
            weight = torch.randn(n, k).to(dtype)
            both = kernels.pack(weight, None), linear_kernel(weight, None)
            for rows in ROWS:
                x = torch.randn(rows, k).to(dtype)
                own_s, torch_s = _best_seconds([lambda x=x, one=one: one(x) for one in both])  # type: ignore[misc]
                yield Measured(str(dtype).removeprefix("torch."), n, k, rows, own_s * 1e3, torch_s * 1e3)


def rules_of(measured: Sequence[Measured]) -> tuple[Rule, ...]:
    """Rules for each dtype, of which the first is for all matrices. Between two sizes, the nearer one's counts."""
    rules: list[Rule] = []
    for dtype in dict.fromkeys(one.dtype for one in measured):
        sizes = sorted({one.out_features * one.in_features for one in measured if one.dtype == dtype})
        for before, size in zip([0, *sizes], sizes, strict=False):
            torch_from: int | None = None
            products = [one for one in measured if (one.dtype, one.out_features * one.in_features) == (dtype, size)]
            for one in sorted(products, key=lambda one: one.rows, reverse=True):
                if one.torch_ms * GAIN > one.kernels_ms:
                    break
                torch_from = one.rows
            if not before or rules[-1].torch_from != torch_from:
                rules.append(Rule(dtype, math.isqrt(before * size), torch_from))
    return tuple(rules)


def _best_seconds(works: Sequence[Callable[[], object]]) -> list[float]:
    for work in works:
        work()
    best = [math.inf] * len(works)
    begin = time.perf_counter()
    for repetition in range(_REPETITIONS):
        if repetition and time.perf_counter() - begin > _LONG_S:
            break
        for number, work in enumerate(works):
            start = time.perf_counter()
            work()
            best[number] = min(best[number], time.perf_counter() - start)
    return best
