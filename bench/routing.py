"""Routing policies on a trace with shared prefixes: real workers, each with too little room for all of it.

    python -m bench.routing TRACE.jsonl [--policies round_robin,least_load,prefix_aware] [--requests 200] [--rate 0.3]

TRACE has a JSON object a line, in Mooncake's format: `input_length`, `output_length` (tokens) and `hash_ids`, one for
each 512 tokens; equal beginnings of `hash_ids` are equal beginnings of prompts. Lengths are divided by --divide. Each
policy gets a fresh stack of two prefill and two decode workers over NIXL, without a store, and the same requests at the
same times (Poisson, --rate a second). Each worker has room for --room of the distinct blocks. With --no-sharing every
prompt is new.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from bench.processes import running_stack
from common.config import DEFAULT_MODEL, default_cache_dir
from protos.baton.v1 import inference_pb2, inference_pb2_grpc, types_pb2

TRACE_BLOCK = 512  # tokens that one of a trace's hash ids stands for
BLOCK_SIZE = 16
MAX_TOKEN_ID = 30_000  # in any vocabulary
WARM_UP = 4


@dataclass(slots=True, frozen=True)
class Request:
    at: float  # seconds after the start
    prompt: list[int]
    num_output_tokens: int


@dataclass(slots=True, frozen=True)
class Outcome:
    ttft_ms: float
    num_prompt_tokens: int
    num_cached_tokens: int
    decode_worker: str
    prefill_worker: str  # empty: in place


def read_trace(args: argparse.Namespace) -> list[Request]:
    draw, size = random.Random(args.seed), TRACE_BLOCK // args.divide
    requests: list[Request] = []
    at = 0.0
    with args.trace.open() as file:
        for number, line in enumerate(file):
            if number < args.skip:
                continue
            if len(requests) == args.requests:
                break
            entry = json.loads(line)
            num_tokens = max(entry["input_length"] // args.divide, 1)
            if num_tokens > args.max_prompt_tokens:
                continue
            prompt: list[int] = []
            for hash_id in entry["hash_ids"]:
                seed = f"{args.seed}/{hash_id}" + (f"/{number}" if args.no_sharing else "")
                prompt += random.Random(seed).choices(range(10, MAX_TOKEN_ID), k=size)
            num_output = max(min(entry["output_length"] // args.divide, args.max_output_tokens), 1)
            at += draw.expovariate(args.rate)
            requests.append(Request(at, prompt[:num_tokens], num_output))
    return requests


def num_distinct_blocks(requests: Sequence[Request]) -> int:
    return len(
        {
            tuple(request.prompt[: end + BLOCK_SIZE])
            for request in requests
            for end in range(0, len(request.prompt) - BLOCK_SIZE + 1, BLOCK_SIZE)
        }
    )


async def ask(stub: inference_pb2_grpc.InferenceServiceAsyncStub, request: Request) -> Outcome:
    call = inference_pb2.GenerateRequest(
        prompt_token_ids=request.prompt,
        sampling_params=types_pb2.SamplingParams(temperature=0, max_tokens=request.num_output_tokens, ignore_eos=True),
    )
    start, first, last = time.perf_counter(), 0.0, inference_pb2.GenerateResponse()
    async for response in stub.Generate(call):
        if response.token_ids and not first:
            first = time.perf_counter()
        last = response
    report, usage = last.report, last.usage
    return Outcome(
        1000 * (first - start), usage.prompt_tokens, usage.cached_tokens, report.decode_worker, report.prefill_worker
    )


async def replay(address: str, requests: Sequence[Request], seed: int) -> list[Outcome]:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        draw = random.Random(f"warm-up {seed}")
        for _ in range(WARM_UP):
            await ask(stub, Request(0.0, draw.choices(range(10, MAX_TOKEN_ID), k=200), 4))
        start = time.perf_counter()

        async def one(request: Request) -> Outcome:
            await asyncio.sleep(start + request.at - time.perf_counter())
            return await ask(stub, request)

        return await asyncio.gather(*map(one, requests))


def figures(outcomes: Sequence[Outcome]) -> dict[str, float]:
    times = sorted(outcome.ttft_ms for outcome in outcomes)
    decode = Counter(outcome.decode_worker for outcome in outcomes)
    prefill = Counter(outcome.prefill_worker for outcome in outcomes if outcome.prefill_worker)
    prompt_tokens = sum(outcome.num_prompt_tokens for outcome in outcomes)
    return {
        "cached": sum(outcome.num_cached_tokens for outcome in outcomes) / prompt_tokens,
        "TTFT mean ms": statistics.mean(times),
        "TTFT p50 ms": statistics.median(times),
        "TTFT p99 ms": times[min(int(0.99 * len(times)), len(times) - 1)],
        "in place": sum(not outcome.prefill_worker for outcome in outcomes) / len(outcomes),
        "decode most/mean": max(decode.values()) * 2 / len(outcomes),
        "prefill most/mean": max(prefill.values()) * 2 / sum(prefill.values()) if prefill else 0.0,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--policies", default="round_robin,least_load,prefix_aware")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--skip", type=int, default=0, help="lines of the trace to leave out")
    parser.add_argument("--rate", type=float, default=0.3, help="requests a second")
    parser.add_argument("--divide", type=int, default=16)
    parser.add_argument("--room", type=float, default=0.4, help="share of the distinct blocks that a worker can hold")
    parser.add_argument("--max-prompt-tokens", type=int, default=4096)
    parser.add_argument("--max-output-tokens", type=int, default=8)
    parser.add_argument("--no-sharing", action="store_true")
    parser.add_argument("--connector", default="nixl")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    requests = read_trace(args)
    distinct = num_distinct_blocks(requests)
    longest = max(len(one.prompt) + one.num_output_tokens for one in requests) // BLOCK_SIZE + 2
    num_blocks = max(int(args.room * distinct), 2 * longest)
    num_tokens = sum(len(one.prompt) for one in requests)
    print(
        f"{len(requests)} requests, {num_tokens:,} prompt tokens, {distinct:,} distinct blocks "
        f"({distinct * BLOCK_SIZE / num_tokens:.0%} of the tokens), {num_blocks:,} blocks a worker"
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
