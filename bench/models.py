"""Baton's own decoder, transformers' code on Baton's cache, and transformers itself: the same weights and tokens.

    python -m bench.models [--models smollm2-135m,llama-1b,qwen3-moe] [--dtype bfloat16] [--kernels VARIANT]
                           [--repeats 5] [--json FILE]

Milliseconds of a prefill of 512 tokens and of a decode step after 128 tokens, one sequence and eight. One thread, and
the seconds of that thread on the CPU, so that other work on the machine disturbs little; the systems take turns.
llama-1b and qwen3-moe (64 experts, 8 of them for a token) have random weights.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from unittest import mock

import torch
from transformers import LlamaConfig, PreTrainedConfig, Qwen3MoeConfig

from bench.engine import LLAMA_1B, random_model
from bench.engine_systems import BatonEngine, Row, Transformers, add_kernels_option, check_kernels
from bench.measure import interleave, print_table
from common.config import DEFAULT_MODEL, default_cache_dir
from common.cpu import read_cpu
from engine.kernels.choice import AUTO, choose
from engine.loading.embedded_model import ensure_model
from engine.models import registry

ROWS = (Row(1, 512), Row(1, 128, 16), Row(8, 128, 8))
NUM_BLOCKS = max(row.num_blocks for row in ROWS) + 8
SMALL = "smollm2-135m"
QWEN3_MOE = {
    "vocab_size": 49152,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "moe_intermediate_size": 384,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
RANDOM: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama-1b": lambda: LlamaConfig(**LLAMA_1B),
    "qwen3-moe": lambda: Qwen3MoeConfig(**QWEN3_MOE),
}


def on_transformers_code(model_dir: Path, dtype: str, kernels: str = AUTO) -> BatonEngine:
    """The engine as it would be if Baton had no decoder of its own for this model."""
    config = json.loads((model_dir / "config.json").read_text())
    served = {config["model_type"]: config["architectures"][0]}
    with mock.patch.multiple(registry, FAMILIES={}, VERIFIED=served):
        return BatonEngine(model_dir, dtype, 1, num_blocks=NUM_BLOCKS, kernels=kernels)


def milliseconds(system: BatonEngine | Transformers) -> Callable[[], Mapping[str, float]]:
    return lambda: {row.name: 1e3 * system.measure(row, time.thread_time) / max(1, row.steps) for row in ROWS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = (SMALL, *RANDOM)
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(known))
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    add_kernels_option(parser)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    check_kernels(parser, args)
    if unknown := set(args.models) - set(known):
        parser.error(f"--models: {', '.join(sorted(unknown))} is none of {', '.join(known)}")
    torch.set_num_threads(1)
    results = {}
    for name in args.models:
        with ExitStack() as stack:
            model_dir = ensure_model(DEFAULT_MODEL, default_cache_dir(), print)
            if name in RANDOM:
                model_dir = stack.enter_context(random_model(RANDOM[name](), model_dir))
            systems = {
                "native": milliseconds(
                    BatonEngine(model_dir, args.dtype, 1, num_blocks=NUM_BLOCKS, kernels=args.kernels)
                ),
                "transformers' code": milliseconds(on_transformers_code(model_dir, args.dtype, args.kernels)),
                "transformers": milliseconds(Transformers(model_dir, args.dtype, 1)),
            }
            rows = interleave(systems, args.repeats)
        title = (
            f"{read_cpu().title}\n{name}, {args.dtype}, kernels {choose(args.kernels).instruction_set}, one thread: "
            "milliseconds of CPU time, prefill or decode step"
        )
        print_table(title, rows, ratio=("transformers' code", "native"))
        results[name] = {row: {system: asdict(figure) for system, figure in each.items()} for row, each in rows.items()}
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
