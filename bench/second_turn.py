"""Time to first token of a conversation's second turn, if the prefill worker reads the first answer from the decode
worker, and if it computes that answer's KV again.

    python -m bench.second_turn [--answer-tokens 256] [--new-tokens 32] [--repeats 5] [--json FILE]

Two stacks of one prefill and one decode worker, `nixl`, no store; they take turns. Each conversation is new.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from baton.client.sync_client import Client
from bench.engine_systems import random_prompts
from bench.measure import interleave, print_table, write_json
from bench.processes import running_stack
from common.config import DEFAULT_MODEL, default_cache_dir
from engine.loading.dtype import resolve_dtype
from engine.loading.embedded_model import ensure_model


def measure(client: Client, args: argparse.Namespace, seed: list[int]) -> Mapping[str, float]:
    seed[0] += 1
    (first,) = random_prompts(1, args.prompt_tokens, 20_000 + seed[0])
    (new,) = random_prompts(1, args.new_tokens, 30_000 + seed[0])
    answer = client.generate(first, temperature=0.0, max_tokens=args.answer_tokens, ignore_eos=True).result()
    second = client.generate([*first, *answer.token_ids, *new], temperature=0.0, max_tokens=2, ignore_eos=True).result()
    return {
        "TTFT of turn two, ms": second.report.timings.ttft_ms,
        "  prefill ms": second.report.timings.prefill_ms,
        "  cached tokens": float(second.usage.cached_tokens),
        "  blocks lent": float(second.report.num_blocks_lent),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float32"])
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--answer-tokens", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    dtype = resolve_dtype(args.dtype, ensure_model(args.model, default_cache_dir(), print), "cpu").dtype
    common = ["--model", args.model, "--device", "cpu", "--dtype", dtype, "--connector", "nixl", "--num-threads", "1"]
    seeds: dict[str, list[int]] = {"read": [0], "computed": [0]}
    with ExitStack() as stack:
        lends = stack.enter_context(Client(stack.enter_context(running_stack(common))))
        keeps = stack.enter_context(Client(stack.enter_context(running_stack([*common, "--no-lend-blocks"]))))
        rows = interleave(
            {
                "read": lambda: measure(lends, args, seeds["read"]),
                "computed": lambda: measure(keeps, args, seeds["computed"]),
            },
            args.repeats,
        )
    print_table(
        f"{dtype}, {args.answer_tokens} tokens of the first answer and {args.new_tokens} new ones",
        rows,
        ratio=("computed", "read"),
    )
    if args.json:
        write_json(args.json, rows)


if __name__ == "__main__":
    main()
