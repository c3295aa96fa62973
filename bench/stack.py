"""The full stack against the engine alone: what router, gRPC, processes and handoff add to the time to first token.

    python -m bench.stack [--dtype auto] [--prompt-tokens 512] [--repeats 5] [--json FILE]

One request in flight. The engine alone runs in this process, on the core and with the number of threads that the
stack's prefill worker has; stack and engine take turns. Each prompt is new, so no prefix cache helps.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping
from pathlib import Path

import grpc
import torch

from bench.engine_systems import BatonEngine, random_prompts
from bench.measure import interleave, print_table, write_json
from bench.processes import running_stack
from common.config import DEFAULT_MODEL, default_cache_dir
from engine.loading.dtype import resolve_dtype
from engine.loading.embedded_model import ensure_model
from protos.baton.v1 import inference_pb2, inference_pb2_grpc, types_pb2


class Stack:
    def __init__(self, address: str) -> None:
        self._stub = inference_pb2_grpc.InferenceServiceStub(grpc.insecure_channel(address))

    def generate(self, prompt: list[int], num_new: int) -> tuple[dict[str, float], types_pb2.RequestReport]:
        """Times as the client sees them, in ms, and what Baton says of the request."""
        request = inference_pb2.GenerateRequest(
            prompt_token_ids=prompt,
            sampling_params=types_pb2.SamplingParams(temperature=0, max_tokens=num_new, ignore_eos=True),
        )
        start = time.perf_counter()
        marks: list[float] = []
        report = types_pb2.RequestReport()
        for message in self._stub.Generate(request):
            marks += [time.perf_counter()] * len(message.token_ids)
            if message.HasField("report"):
                report = message.report
        if len(marks) != num_new:
            raise RuntimeError(f"{len(marks)} tokens instead of {num_new}")
        figures = {"TTFT ms": (marks[0] - start) * 1000}
        if num_new > 2:
            figures["first to second token ms"] = (marks[1] - marks[0]) * 1000
            figures["TPOT ms"] = (marks[-1] - marks[1]) / (num_new - 2) * 1000
            figures["tokens/s, whole request"] = num_new / (marks[-1] - start)
        return figures, report


def measure_stack(stack: Stack, args: argparse.Namespace, seed: list[int]) -> Mapping[str, float]:
    seed[0] += 1
    (prompt,) = random_prompts(1, args.prompt_tokens, 10_000 + seed[0])
    figures, report = stack.generate(prompt, args.new_tokens)
    timings = report.timings
    return figures | {
        "  queue ms": timings.queue_ms,
        "  prefill ms": timings.prefill_ms,
        "  handoff ms": timings.handoff_ms,
        "  first decode ms": timings.first_decode_ms,
        "  blocks moved": float(report.num_blocks_moved),
    }


def measure_engine(engine: BatonEngine, args: argparse.Namespace, seed: list[int]) -> Mapping[str, float]:
    seed[0] += 1
    prompts = random_prompts(1, args.prompt_tokens, 10_000 + seed[0])
    first = engine.generate(prompts, 1)
    whole = engine.generate(prompts, args.new_tokens)
    return {
        "TTFT ms": first * 1000,
        "TPOT ms": (whole - first) / (args.new_tokens - 1) * 1000,
        "tokens/s, whole request": args.new_tokens / whole,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float32"])
    parser.add_argument("--connector", default="shared_storage")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    num_cores = max(len(cores) // 2, 1)
    model_dir = ensure_model(args.model, default_cache_dir(), print)
    args.dtype = resolve_dtype(args.dtype, model_dir, "cpu").dtype
    arguments = ["--model", args.model, "--device", "cpu", "--dtype", args.dtype, "--connector", args.connector]
    with running_stack(arguments) as address:
        os.sched_setaffinity(0, cores[:num_cores])
        torch.set_num_threads(num_cores)
        engine, stack = BatonEngine(model_dir, args.dtype, num_cores), Stack(address)
        seeds: dict[str, list[int]] = {"engine alone": [0], "full stack": [0]}
        rows = interleave(
            {
                "full stack": lambda: measure_stack(stack, args, seeds["full stack"]),
                "engine alone": lambda: measure_engine(engine, args, seeds["engine alone"]),
            },
            args.repeats,
        )
    added = rows["TTFT ms"]["full stack"].median - rows["TTFT ms"]["engine alone"].median
    print_table(
        f"{args.dtype}, 1 prefill and 1 decode worker of {num_cores} core(s), {args.connector}, "
        f"{args.prompt_tokens} prompt and {args.new_tokens} new tokens",
        rows,
    )
    print(f"The full stack adds {added:.1f} ms to the time to first token.")
    if args.json:
        write_json(args.json, rows)


if __name__ == "__main__":
    main()
