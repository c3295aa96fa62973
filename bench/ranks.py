"""What ranks of one model cost each other: exchanges of values, and steps that they compute together.

    python -m bench.ranks exchange [--ranks 2] [--bytes 8192,1048576] [--repeats 400] [--dtype float32]
    python -m bench.ranks experts [--ranks 4] [--experts 64] [--per-token 2] [--tokens 32,1024] [--width 2048]
    python -m bench.ranks steps [--ranks 2] [--stages 2] [--model DIRECTORY] [--dtype bfloat16] [--repeats 5]

`exchange`: microseconds of an all-reduce in shared memory and by Gloo over loopback, the median on rank 0, and how long
its thread had a core for each.

`experts`: microseconds of a layer's exchanges in shared memory if experts are dealt out; they compute nothing here. Of
data ranks all-to-alls, beside a gather of all tokens and a sum; of expert ranks row by row, beside an all-reduce. The
median on rank 0, how long its thread had a core, and how many bytes it got from others.

`steps`: milliseconds of a decode step of 1 and of 8 sequences after 128 tokens and of a prompt of 512 tokens, by one
process with as many threads as there are ranks, by the ranks with one thread each, and with --stages by so many stages
of one rank; the median. Then the share of its time that rank 0 spent in exchanges, waiting included; of stages, what it
waited for the stage before. Without --model a Llama of 16 layers with random weights
computes: the embedded model has 9 heads, which 2 ranks cannot share.

Times are those of a clock: nothing else may run, and each rank needs a core.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import ClassVar, TypeVar
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table
from torch.distributed import FileStore  # type: ignore[attr-defined]
from transformers import LlamaConfig

from bench.engine import random_model
from common.config import DEFAULT_MODEL, EngineSettings, default_cache_dir
from common.cpu import read_cpu
from engine.device import Device, do_nothing
from engine.loading.embedded_model import ensure_model
from engine.local.device import LocalDevice
from engine.ranks.data_ranks import DataRanks
from engine.ranks.dealt_experts import OfOwnTokens, OfSameTokens, asked_ranks, share_of_ranks, stops_of
from engine.ranks.device import RankedDevice
from engine.ranks.group import WHOLE_SUM_BYTES, GlooGroup, RankGroup
from engine.ranks.link import SocketLink
from engine.ranks.shared_memory import SharedMemoryGroup, make_segment
from engine.step import Draw, StepRow

T = TypeVar("T")

BLOCK_SIZE = 16
CONTEXT, PROMPT = 128, 512
LLAMA = {
    "vocab_size": 49152,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 2048,
}
_LIKELIEST = Draw(index=0, temperature=0.0)


def seconds_of(call: Callable[[], object], repeats: int) -> tuple[float, float]:
    """The median, and this thread's seconds on a core in the mean."""
    for _ in range(10):
        call()
    taken, on_core = [], time.thread_time()
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken), (time.thread_time() - on_core) / repeats


def seconds_of_sums(
    group: RankGroup, sizes: Sequence[int], repeats: int, dtype: torch.dtype
) -> list[tuple[float, float]]:
    """Of one all-reduce of each size."""
    values = [torch.zeros(num_bytes // dtype.itemsize, dtype=dtype) for num_bytes in sizes]
    return [seconds_of(partial(group.all_reduce, one), repeats) for one in values]


def exchange(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dtype = getattr(torch, args.dtype)
    segment = make_segment(args.ranks)
    with tempfile.TemporaryDirectory() as folder:
        make: dict[str, Callable[[int], RankGroup]] = {
            "shared memory": lambda rank: SharedMemoryGroup(segment, rank, args.ranks, lambda _: ""),
            "Gloo": lambda rank: GlooGroup(FileStore(f"{folder}/store", args.ranks), rank, args.ranks),
        }
        table = Table(title=f"{read_cpu().title}\n{args.ranks} ranks, {args.dtype}: an all-reduce, µs")
        for name in ("bytes", *(f"{way}{what}" for way in make for what in (", median", ", on a core"))):
            table.add_column(name, justify="right")
        columns = [
            _on_all(args.ranks, one, lambda group: seconds_of_sums(group, args.bytes, args.repeats, dtype))
            for one in make.values()
        ]
    for num_bytes, *ways in zip(args.bytes, *columns, strict=True):
        table.add_row(f"{num_bytes:,}", *(f"{1e6 * value:.1f}" for way in ways for value in way))
    Console(width=120).print(table)


def _on_all(size: int, make: Callable[[int], RankGroup], measured: Callable[[RankGroup], T]) -> T:
    """What rank 0 measures; the others are forks of this process."""
    fork = multiprocessing.get_context("fork")

    def work(rank: int) -> None:
        measured(make(rank))
        os._exit(0)

    others = [fork.Process(target=work, args=(rank,), daemon=True) for rank in range(1, size)]
    for process in others:
        process.start()
    found = measured(make(0))
    for process in others:
        process.join(10)
    return found


class CountedBytes(SharedMemoryGroup):
    """Adds up what comes from other ranks."""

    num_bytes = 0

    def all_reduce(self, values: torch.Tensor) -> None:
        super().all_reduce(values)
        is_whole = values.nbytes <= WHOLE_SUM_BYTES
        self.num_bytes += values.nbytes * (self.size - 1) * (self.size if is_whole else 2) // self.size

    def all_gather(self, values: torch.Tensor) -> torch.Tensor:
        self.num_bytes += values.nbytes * (self.size - 1)
        return super().all_gather(values)

    def all_to_all(
        self, rows: torch.Tensor, counts: Sequence[int], num_from: Sequence[int] | None = None
    ) -> tuple[torch.Tensor, list[int]]:
        came, of_ranks = super().all_to_all(rows, counts, num_from)
        self.num_bytes += (len(came) - of_ranks[self.rank]) * came[:1].nbytes
        return came, of_ranks


def exchanges_of_experts(group: RankGroup, num_tokens: int, args: argparse.Namespace) -> list[tuple[float, float, int]]:
    """Seconds, seconds on a core and bytes from others of each way, in the order of `WAYS`. `num_tokens` of all ranks
    together."""
    assert isinstance(group, CountedBytes)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((num_tokens, args.width), generator=generator).to(getattr(torch, args.dtype))
    chosen = torch.rand((num_tokens, args.experts), generator=generator).argsort(1)[:, : args.per_token]
    shares = torch.rand((num_tokens, args.per_token), generator=generator)
    stops = [num_tokens * rank // group.size for rank in range(group.size + 1)]
    counts = [stop - start for start, stop in pairwise(stops)]
    own = slice(stops[group.rank], stops[group.rank + 1])
    of_own, of_same = OfOwnTokens(group, args.experts), OfSameTokens(group, args.experts)

    def nothing(x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:  # noqa: ARG001
        return x

    def gather_and_sum() -> torch.Tensor:
        everything = DataRanks(group).join(x[own], counts)
        group.all_reduce(everything)
        return everything[own].clone()

    def row_by_row() -> torch.Tensor:
        return of_same.add_up_rows(x, asked_ranks(chosen, stops_of(args.experts, group.size), group.size))

    calls: list[Callable[[], object]] = [
        lambda: of_own(nothing, x[own], chosen[own], shares[own]),
        gather_and_sum,
        row_by_row,
        lambda: group.all_reduce(x.clone()),
    ]
    found = []
    for call in calls:
        group.num_bytes = 0
        call()
        num_bytes = group.num_bytes
        found.append((*seconds_of(call, args.repeats), num_bytes))
    return found


WAYS = ("data ranks: all to all", "gather and sum", "expert ranks: row by row", "all-reduce")


def _counted(segment: int, size: int, rank: int) -> CountedBytes:
    return CountedBytes(segment, rank, size, lambda _: "")


def experts(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    p = share_of_ranks(args.experts, args.per_token, args.ranks)
    table = Table(
        title=f"{read_cpu().title}\n{args.ranks} ranks, {args.per_token} of {args.experts} experts for a token "
        f"(on {p:.0%} of the ranks), {args.width} wide, {args.dtype}"
    )
    for name in ("tokens", "exchange", "µs, median", "on a core", "bytes from others"):
        table.add_column(name, justify="right")
    for num_tokens in args.tokens:
        segment = make_segment(args.ranks)
        found = _on_all(
            args.ranks,
            partial(_counted, segment, args.ranks),
            partial(exchanges_of_experts, num_tokens=num_tokens, args=args),
        )
        os.close(segment)
        for way, (median, on_core, num_bytes) in zip(WAYS, found, strict=True):
            table.add_row(f"{num_tokens}", way, f"{1e6 * median:.0f}", f"{1e6 * on_core:.0f}", f"{num_bytes:,}")
    Console(width=120).print(table)


def step_rows(batch: int) -> list[StepRow]:
    """Decodes of so many sequences; 0: a prompt."""
    if not batch:
        blocks = list(range(PROMPT // BLOCK_SIZE))
        return [StepRow(token_ids=[5] * PROMPT, num_computed_tokens=0, block_ids=blocks, draw=_LIKELIEST)]
    blocks_each = CONTEXT // BLOCK_SIZE + 1
    return [
        StepRow(
            token_ids=[7 + number],
            num_computed_tokens=CONTEXT,
            block_ids=list(range(number * blocks_each, (number + 1) * blocks_each)),
            draw=_LIKELIEST,
        )
        for number in range(batch)
    ]


class WatchedLink(SocketLink):
    """Adds up the seconds that hidden states are waited for."""

    def receive(self, meanwhile: Callable[[], None] = do_nothing) -> torch.Tensor:
        start = time.perf_counter()
        values = super().receive(meanwhile)
        Watched.seconds += time.perf_counter() - start
        return values


class Watched(SharedMemoryGroup):
    """Adds up the seconds that exchanges take."""

    seconds: ClassVar[float] = 0.0

    def all_reduce(self, values: torch.Tensor) -> None:
        start = time.perf_counter()
        super().all_reduce(values)
        Watched.seconds += time.perf_counter() - start

    def all_gather(self, values: torch.Tensor) -> torch.Tensor:
        start = time.perf_counter()
        gathered = super().all_gather(values)
        Watched.seconds += time.perf_counter() - start
        return gathered

    def all_to_all(
        self, rows: torch.Tensor, counts: Sequence[int], num_from: Sequence[int] | None = None
    ) -> tuple[torch.Tensor, list[int]]:
        start = time.perf_counter()
        came = super().all_to_all(rows, counts, num_from)
        Watched.seconds += time.perf_counter() - start
        return came


def measure(device: Device, batch: int, repeats: int) -> tuple[float, float]:
    """Milliseconds of a step, and the share of exchanges in all of them."""
    rows, times = step_rows(batch), 1 if not batch else 16
    device.compute(rows)
    taken, Watched.seconds = [], 0.0
    for _ in range(repeats * times):
        start = time.perf_counter()
        device.compute(rows)
        taken.append(time.perf_counter() - start)
    return 1e3 * statistics.median(taken), Watched.seconds / sum(taken)


def steps(args: argparse.Namespace) -> None:
    embedded = ensure_model(DEFAULT_MODEL, default_cache_dir(), print)
    with random_model(LlamaConfig(**LLAMA), embedded) if args.model is None else nullcontext(args.model) as model_dir:
        num_threads = max(args.ranks, args.stages)
        one = _measured(model_dir, args, num_threads)
        ways = {f"{args.ranks} ranks, a thread each": _measured(model_dir, args, args.ranks, num_ranks=args.ranks)}
        if args.stages > 1:
            name = f"{args.stages} stages, a thread each"
            ways[name] = _measured(model_dir, args, args.stages, num_stages=args.stages)
    table = Table(title=f"{read_cpu().title}\n{args.dtype}: a step, ms")
    for name in ("step", f"one process, {num_threads} threads"):
        table.add_column(name, justify="right")
    for way in ways:
        for name in (way, "times", "exchanges"):
            table.add_column(name, justify="right")
    for index, name in enumerate(("decode 1", "decode 8", f"prefill {PROMPT}")):
        alone, _ = one[index]
        cells = [name, f"{alone:.2f}"]
        for shared, share in (found[index] for found in ways.values()):
            cells += [f"{shared:.2f}", f"{alone / shared:.2f}", f"{share:.0%}"]
        table.add_row(*cells)
    Console(width=120).print(table)


def _measured(
    model_dir: Path, args: argparse.Namespace, num_threads: int, *, num_ranks: int = 1, num_stages: int = 1
) -> list[tuple[float, float]]:
    settings = EngineSettings(
        device="cpu",
        dtype=args.dtype,
        block_size=BLOCK_SIZE,
        num_blocks=8 * (CONTEXT // BLOCK_SIZE + 1),
        max_model_len=1024,
        num_threads=num_threads,
        tensor_parallel_size=num_ranks,
        pipeline_parallel_size=num_stages,
    )
    device: LocalDevice | RankedDevice
    if num_ranks * num_stages == 1:
        device = LocalDevice(model_dir, settings)
    else:
        with (
            mock.patch("engine.ranks.meeting.SharedMemoryGroup", Watched),
            mock.patch("engine.ranks.meeting.SocketLink", WatchedLink),
        ):
            device = RankedDevice(model_dir, settings)
    device.warm_up()
    found = [measure(device, batch, args.repeats) for batch in (1, 8, 0)]
    if isinstance(device, RankedDevice):
        device.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_subparsers(required=True)
    exchanging = what.add_parser("exchange")
    exchanging.add_argument("--bytes", type=lambda text: [int(one) for one in text.split(",")], default=[8192, 1 << 20])
    exchanging.add_argument("--repeats", type=int, default=400)
    exchanging.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    exchanging.set_defaults(run=exchange)
    dealing = what.add_parser("experts")
    dealing.add_argument("--experts", type=int, default=64)
    dealing.add_argument("--per-token", type=int, default=2)
    dealing.add_argument("--tokens", type=lambda text: [int(one) for one in text.split(",")], default=[32, 1024])
    dealing.add_argument("--width", type=int, default=2048)
    dealing.add_argument("--repeats", type=int, default=50)
    dealing.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    dealing.set_defaults(run=experts)
    stepping = what.add_parser("steps")
    stepping.add_argument("--model", type=Path)
    stepping.add_argument("--repeats", type=int, default=5)
    stepping.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    stepping.add_argument("--stages", type=int, default=1)
    stepping.set_defaults(run=steps)
    for one, num_ranks in ((exchanging, 2), (dealing, 4), (stepping, 2)):
        one.add_argument("--ranks", type=int, default=num_ranks)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
