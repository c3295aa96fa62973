"""Products of the kernels with weights of each kind: one token, whose weights are read from caches, and 512 tokens.

    python -m bench.products [--kernels VARIANT]

One thread, whose seconds on the CPU are counted. The best of 40 rounds of 50 products with one token, and of 8 with
512.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table

from bench.engine_systems import add_kernels_option, check_kernels
from common.cpu import read_cpu
from engine.kernels.choice import TORCH, choose
from engine.kernels.library import Kernels, WeightKind
from engine.layers import linear_kernel

ONE_TOKEN = (1536, 576)  # [out_features, in_features]
MANY_TOKENS, MANY = 512, (1024, 1024)
KINDS = (WeightKind.FLOAT32, WeightKind.BFLOAT16, WeightKind.INT8, WeightKind.INT4)


def best_s(work: Callable[[], object], rounds: int, times: int) -> float:
    """Seconds of one call."""
    work()
    best = float("inf")
    for _ in range(rounds):
        start = time.thread_time()
        for _ in range(times):
            work()
        best = min(best, time.thread_time() - start)
    return best / times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_kernels_option(parser)
    args = parser.parse_args()
    check_kernels(parser, args)
    choice = choose(args.kernels)
    if choice.instruction_set == TORCH:
        parser.error(f"no kernels: {choice.reason}")
    torch.set_num_threads(1)
    kernels = Kernels(choice, 1)
    table = Table(title=f"{read_cpu().title}\n{choice.instruction_set}, one thread")
    for name in ("weights", "one token, µs", "GB/s", "512 tokens, GFLOP/s", "torch"):
        table.add_column(name, justify="right")
    one, many = torch.randn(ONE_TOKEN), torch.randn(MANY)
    gflop = 2 * MANY_TOKENS * MANY[0] * MANY[1] / 1e9
    for kind in KINDS:
        dtype = torch.bfloat16 if kind is WeightKind.BFLOAT16 else torch.float32
        small, large = kernels.pack(one, None, kind), kernels.pack(many, None, kind)
        x, rows = torch.randn(1, ONE_TOKEN[1]), torch.randn(MANY_TOKENS, MANY[1])
        seconds = best_s(lambda small=small, x=x: small(x), 40, 50)  # type: ignore[misc]
        many_s = best_s(lambda large=large, rows=rows: large(rows), 8, 1)  # type: ignore[misc]
        torchs = ""
        if kind in (WeightKind.FLOAT32, WeightKind.BFLOAT16):
            multiply, rows = linear_kernel(many.to(dtype), None), rows.to(dtype)
            torch_s = best_s(lambda multiply=multiply, rows=rows: multiply(rows), 4, 1)  # type: ignore[misc]
            torchs = f"{gflop / torch_s:.0f}"
        num_bytes = kernels.library.baton_packed_bytes(kind, *ONE_TOKEN)
        cells = (f"{seconds * 1e6:.1f}", f"{num_bytes / seconds / 1e9:.0f}", f"{gflop / many_s:.0f}", torchs)
        table.add_row(kind.name.lower(), *cells)
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
