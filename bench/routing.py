"""Routing policies on requests that share prefixes: real workers, each with too little room for all of them.

    python -m bench.routing TRACE.jsonl [--policies round_robin,least_load,prefix_aware] [--requests 400] [--rate 0.3]
    python -m bench.routing --chats       # users who come back with the whole conversation so far
    python -m bench.routing … --quick     # a few minutes: whether it works, and no figure

TRACE has a JSON object a line, in Mooncake's format: `input_length`, `output_length` (tokens) and `hash_ids`, one for
each 512 tokens; equal beginnings of `hash_ids` are equal beginnings of prompts. Lengths are divided by --divide. Each
policy gets a fresh stack of two prefill and two decode workers over NIXL, without a store, and the same requests at the
same times (Poisson, --rate a second). Each worker has room for --room of the distinct blocks. With --no-sharing every
prompt is new.

Policies can only differ if prompts share something. --skip and --requests are chosen for Mooncake's synthetic trace,
whose prompts come back late: an endless cache has 62 % of the blocks of its 400 requests from line 3,500 on, and 6 % of
those of the first 200. (Of the conversation trace it has 6 to 8 %, wherever 200 requests are taken from, so that no
policy can be much better there.) The first line that is printed says it of the requests that were taken.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench.load import clients
from bench.load.clients import GrpcClient, RefusedError
from bench.load.loops import open_loop
from bench.load.percentiles import percentile
from bench.processes import running_stack
from bench.routing_requests import BLOCK_SIZE, TOKEN_IDS, Request, make_chats, num_distinct_blocks, read_trace
from common.config import DEFAULT_MODEL, default_cache_dir
from common.errors import ConfigError
from protos.baton.v1 import inference_pb2

WARM_UP = 4
DEFAULTS: dict[str, float | str] = {"requests": 400, "skip": 3500, "rate": 0.3, "divide": 16, "max_prompt_tokens": 4096}
DEFAULTS |= {"policies": "round_robin,least_load,prefix_aware"}
QUICK: dict[str, float | str] = {
    "requests": 40,
    "rate": 2.0,
    "max_prompt_tokens": 1024,
    "policies": "round_robin,prefix_aware",
}


@dataclass(slots=True, frozen=True)
class Outcome:
    ttft_ms: float
    num_prompt_tokens: int
    num_cached_tokens: int
    decode_worker: str
    prefill_worker: str  # empty: in place
    lag_ms: float = 0.0  # how late it was sent


async def ask(client: GrpcClient, request: Request) -> Outcome | None:
    """None if it failed. The time to first token counts from the call."""
    options = {"temperature": 0, "ignore_eos": True}
    asked = clients.Request(prompt=request.prompt, max_tokens=request.num_output_tokens, options=options)
    start, first, num, last = time.perf_counter(), 0.0, 0, inference_pb2.GenerateResponse()
    try:
        async for response in client.responses(asked):
            if response.token_ids and not first:
                first = time.perf_counter()
            num += len(response.token_ids)
            last = response
    except RefusedError as refused:
        print(f"failed: {refused.status}: {refused.reason}", file=sys.stderr, flush=True)
        return None
    if num != request.num_output_tokens:
        print(f"failed: {num} tokens, not {request.num_output_tokens}", file=sys.stderr, flush=True)
        return None
    report, usage = last.report, last.usage
    return Outcome(
        1000 * (first - start), usage.prompt_tokens, usage.cached_tokens, report.decode_worker, report.prefill_worker
    )


async def replay(address: str, requests: Sequence[Request], seed: int) -> list[Outcome | None]:
    """Sends each request when it is due, whatever became of those before; times count from then."""
    client = GrpcClient(address)
    try:
        draw = random.Random(f"warm-up {seed}")
        for _ in range(WARM_UP):
            await ask(client, Request(0.0, draw.choices(TOKEN_IDS, k=200), 4))
        sent = await open_loop([one.at for one in requests], lambda number: ask(client, requests[number]))
        return [
            one.result and replace(one.result, ttft_ms=one.result.ttft_ms + 1000 * one.lag_s, lag_ms=1000 * one.lag_s)
            for one in sent
        ]
    finally:
        await client.close()


def figures(outcomes: Sequence[Outcome | None]) -> dict[str, float]:
    """Figures of the requests that were answered, and how many were not."""
    answered = [outcome for outcome in outcomes if outcome is not None]
    num_failed = float(len(outcomes) - len(answered))
    if not answered:
        return {"failed": num_failed}
    times = [outcome.ttft_ms for outcome in answered]
    decode = Counter(outcome.decode_worker for outcome in answered)
    prefill = Counter(outcome.prefill_worker for outcome in answered if outcome.prefill_worker)
    prompt_tokens = sum(outcome.num_prompt_tokens for outcome in answered)
    return {
        "cached": sum(outcome.num_cached_tokens for outcome in answered) / prompt_tokens,
        "TTFT mean ms": statistics.mean(times),
        "TTFT p50 ms": statistics.median(times),
        "TTFT p99 ms": percentile(times, 0.99),
        "send lag p99 ms": percentile([outcome.lag_ms for outcome in answered], 0.99),
        "in place": sum(not outcome.prefill_worker for outcome in answered) / len(answered),
        "decode most/mean": max(decode.values()) * 2 / len(answered),
        "prefill most/mean": max(prefill.values()) * 2 / sum(prefill.values()) if prefill else 0.0,
        "failed": num_failed,
    }


def taken(args: argparse.Namespace) -> list[Request]:
    """Raises `ConfigError`."""
    if args.chats:
        return make_chats(
            num=args.requests,
            rate=args.rate,
            seed=args.seed,
            max_prompt_tokens=args.max_prompt_tokens,
            max_output_tokens=args.max_output_tokens,
        )
    found = read_trace(
        args.trace,
        skip=args.skip,
        num=args.requests,
        rate=args.rate,
        divide=args.divide,
        max_prompt_tokens=args.max_prompt_tokens,
        max_output_tokens=args.max_output_tokens,
        seed=args.seed,
        is_shared=not args.no_sharing,
    )
    if not found:
        raise ConfigError(
            "--skip", f"{args.trace} has no request of {args.max_prompt_tokens} tokens after {args.skip} lines"
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, nargs="?")
    parser.add_argument("--chats", action="store_true", help="multi-turn chats in place of a trace")
    parser.add_argument("--quick", action="store_true", help="few and short requests, if nothing else is asked for")
    parser.add_argument("--policies", help=f"{DEFAULTS['policies']} if not set; likewise below")
    parser.add_argument("--requests", type=int, help=f"{DEFAULTS['requests']}")
    parser.add_argument("--skip", type=int, help=f"lines of the trace to leave out; {DEFAULTS['skip']}")
    parser.add_argument("--rate", type=float, help=f"requests a second; {DEFAULTS['rate']}")
    parser.add_argument("--divide", type=int, help=f"lengths of the trace; {DEFAULTS['divide']}")
    parser.add_argument("--room", type=float, default=0.4, help="share of the distinct blocks that a worker can hold")
    parser.add_argument("--max-prompt-tokens", type=int, help=f"{DEFAULTS['max_prompt_tokens']}")
    parser.add_argument("--max-output-tokens", type=int, default=8)
    parser.add_argument("--no-sharing", action="store_true")
    parser.add_argument("--connector", default="nixl")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if bool(args.trace) == args.chats:
        parser.error("TRACE or --chats is needed, and not both")
    if args.chats and (args.no_sharing or args.skip is not None or args.divide is not None):
        parser.error("--skip, --divide and --no-sharing are for a trace")
    for name, value in {**DEFAULTS, **(QUICK if args.quick else {})}.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    try:
        requests = taken(args)
    except ConfigError as error:
        parser.error(error.message)
    distinct = num_distinct_blocks(requests)
    longest = max(len(one.prompt) + one.num_output_tokens for one in requests) // BLOCK_SIZE + 2
    num_blocks = max(int(args.room * distinct), 2 * longest)
    num_tokens = sum(len(one.prompt) for one in requests)
    num_full = sum(len(one.prompt) // BLOCK_SIZE for one in requests)
    print(
        f"{len(requests)} requests, {num_tokens:,} prompt tokens, {distinct:,} distinct blocks "
        f"(an endless cache has {1 - distinct / num_full:.0%} of the blocks), {num_blocks:,} a worker"
    )
    results = {}
    for policy in args.policies.split(","):
        flags = [f"--policy={policy}", f"--num-blocks={num_blocks}", f"--connector={args.connector}"]
        with running_stack(
            [*flags, f"--model={args.model}", "--prefill=2", "--decode=2", f"--cache-dir={default_cache_dir()}"]
        ) as address:
            results[policy] = figures(asyncio.run(replay(address, requests, args.seed)))
        shown = "  ".join(f"{name} {value:.3g}" for name, value in results[policy].items())
        print(f"{policy:14} {shown}", flush=True)
    if args.json:
        found = {"requests": len(requests), "num_blocks": num_blocks, "policies": results}
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
