"""How much of an engine's step is not the kernels': scheduler, sampling, events, and Python between the calls.

    python -m bench.step [--batch 1,32] [--contexts 128,2048] [--dtype bfloat16] [--quantization none] [--repeats 5]
                         [--kernels VARIANT]
    python -m bench.step --sampling --batch 64 --contexts 60

Decode steps of SmolLM2-135M on one thread, greedy, after contexts that cost nothing. The figures are seconds of that
thread on the CPU, so other work on the machine disturbs little; the best of some repetitions. What a worker's front
does is not among them: it is another process. `--sampling` compares greedy steps with steps of requests that each have
other sampling parameters, the two in turn; alone of these figures it needs no kernels (`--kernels torch`).
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.engine_systems import GREEDY, BatonEngine, Row, add_kernels_option, check_kernels
from common.config import DEFAULT_MODEL, default_cache_dir
from common.cpu import read_cpu
from common.sampling import SamplingParams, TokenSequence
from engine.loading.embedded_model import ensure_model

STEPS = 16


class Stopwatch:
    """Stands for a library and counts the seconds that its functions take."""

    def __init__(self, library: object) -> None:
        self._library = library
        self.seconds = 0.0

    def __getattr__(self, name: str) -> object:
        function = getattr(self._library, name)

        def timed(*arguments: object) -> object:
            start = time.thread_time()
            result = function(*arguments)
            self.seconds += time.thread_time() - start
            return result

        setattr(self, name, timed)
        return timed


def measure(engine: BatonEngine, watch: Stopwatch, row: Row) -> tuple[float, float]:
    """Seconds of a step, and those of them beside the kernels."""
    watch.seconds = 0.0
    whole = engine.measure(row, time.thread_time) / row.steps
    return whole, whole - watch.seconds / row.steps


def unlike_params(number: int) -> SamplingParams:
    """Every parameter that a row may want, each in about every second request."""
    rng = random.Random(number)
    ids = rng.sample(range(40_000), 40)
    maybe = [rng.random() < 0.5 for _ in range(8)]
    return SamplingParams(
        temperature=rng.choice([0.0, 0.3, 0.7, 1.0, 1.5]),
        top_k=rng.choice([0, 0, 20, 50, 1000]),
        top_p=rng.choice([1.0, 0.95, 0.9, 0.5]),
        min_p=0.02 if maybe[0] else 0.0,
        seed=number,
        repetition_penalty=1.2 if maybe[1] else 1.0,
        presence_penalty=0.5 if maybe[2] else 0.0,
        frequency_penalty=0.3 if maybe[3] else 0.0,
        logit_bias=dict.fromkeys(ids[:10], 2.0) if maybe[4] else {},
        allowed_token_ids=tuple(range(5, 1000)) if maybe[5] and maybe[6] else (),
        bad_words_ids=tuple(TokenSequence(token_ids=tuple(ids[i : i + 2])) for i in range(20)) if maybe[6] else (),
        logprobs=rng.choice([0, 5, 20]) if maybe[7] else None,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=_numbers, default=[1, 32])
    parser.add_argument("--contexts", type=_numbers, default=[128, 2048])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--repeats", type=int, default=5)
    add_kernels_option(parser)
    parser.add_argument("--sampling", action="store_true", help="compare greedy requests with unlike ones")
    args = parser.parse_args()
    check_kernels(parser, args)
    rows = [Row(batch, context, STEPS) for batch in args.batch for context in args.contexts]
    num_blocks = max(row.num_blocks for row in rows) + 8
    model_dir: Path = ensure_model(DEFAULT_MODEL, default_cache_dir(), print)
    engine = BatonEngine(model_dir, args.dtype, 1, args.quantization, num_blocks, args.kernels)
    kernels = engine.kernels
    if args.sampling:
        computes = "torch" if kernels is None else kernels.choice.instruction_set
        compare_sampling(engine, f"{args.dtype}, {args.quantization}, {computes}", rows, args.repeats)
        return
    if kernels is None:
        parser.error("there are no kernels here: torch computes (baton doctor says why)")
    watch = Stopwatch(kernels.library)
    kernels.library = watch  # type: ignore[assignment]
    table = Table(
        title=f"{read_cpu().title}\n{args.dtype}, {args.quantization}, {kernels.choice.instruction_set}, one thread: "
        "milliseconds of a decode step"
    )
    for name in ("batch", "context", "whole", "beside the kernels", "share"):
        table.add_column(name, justify="right")
    for row in rows:
        both = [measure(engine, watch, row) for _ in range(args.repeats)]
        whole, beside = min(one for one, _ in both), min(one for _, one in both)
        cells = (f"{1e3 * whole:.2f}", f"{1e3 * beside:.3f}", f"{beside / whole:.1%}")
        table.add_row(str(row.batch), str(row.context), *cells)
    Console(width=100).print(table)


def compare_sampling(engine: BatonEngine, title: str, rows: Sequence[Row], repeats: int) -> None:
    table = Table(title=f"{read_cpu().title}\n{title}, one thread: milliseconds of a decode step")
    for name in ("batch", "context", "greedy", "each its own parameters", "times"):
        table.add_column(name, justify="right")
    for row in rows:
        unlike = [unlike_params(number) for number in range(row.batch)]
        both = [
            [engine.measure(row, time.thread_time, params) for params in ((GREEDY,), unlike)] for _ in range(repeats)
        ]
        greedy, own = (min(of_way) / row.steps for of_way in zip(*both, strict=True))
        cells = (f"{1e3 * greedy:.2f}", f"{1e3 * own:.2f}", f"{own / greedy:.2f}")
        table.add_row(str(row.batch), str(row.context), *cells)
    Console(width=100).print(table)


def _numbers(text: str) -> list[int]:
    return [int(one) for one in text.split(",")]


if __name__ == "__main__":
    main()
