"""Time to first token under load: what it gains or costs that a prefill is done by a prefill worker.

    python -m bench.admission [--dtype float32] [--streams 8] [--prompt-tokens 64] [--newcomers 20] [--repeats 5]

One prefill worker, and two decode workers that take turns, each with a router; the routers differ in
`--min-remote-tokens`. The worker whose turn it is decodes `--streams` streams; newcomers come one by one, at any moment
of a step.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import grpc

from bench.engine_systems import random_prompts
from bench.measure import interleave, print_table, write_json
from bench.processes import running
from common.config import DEFAULT_MODEL
from protos.baton.v1 import inference_pb2, inference_pb2_grpc, types_pb2

COMPARED: dict[str, tuple[str, ...]] = {  # router's flags
    "remote": ("--min-remote-tokens", "1"),
    "in place": ("--min-remote-tokens", "1000000"),
}
MAX_STREAM_TOKENS = 2000
MAX_PAUSE_S = 0.5  # between two newcomers; longer than a step, so that they come at any moment of one


class Stack:
    """A router's clients. Prompts are never repeated, so that no prefix cache helps."""

    def __init__(self, address: str, args: argparse.Namespace, seed: int) -> None:
        self._stub = inference_pb2_grpc.InferenceServiceStub(grpc.insecure_channel(address))
        self._args = args
        self._seed = seed

    def measure(self) -> Mapping[str, float]:
        with self._load() as step_times:
            ttfts = [self._ttft() for _ in range(self._args.newcomers)]
        steps = [after - before for times in step_times for before, after in itertools.pairwise(times)]
        return {
            "TTFT ms, median": statistics.median(ttfts) * 1000,
            "TTFT ms, 9th decile": statistics.quantiles(ttfts, n=10)[-1] * 1000,
            "step ms, median": statistics.median(steps) * 1000,
            "step ms, mean": statistics.fmean(steps) * 1000,
        }

    def _ttft(self) -> float:
        time.sleep(random.uniform(0, MAX_PAUSE_S))
        begin = time.perf_counter()
        for message in self._generate(1):
            if message.token_ids:
                return time.perf_counter() - begin
        raise RuntimeError("an answer without a token")

    @contextlib.contextmanager
    def _load(self) -> Iterator[list[list[float]]]:
        """Gives, for each stream, when its tokens came."""
        calls = [self._generate(MAX_STREAM_TOKENS) for _ in range(self._args.streams)]
        times: list[list[float]] = [[] for _ in calls]
        readers = [threading.Thread(target=_read, args=pair) for pair in zip(calls, times, strict=True)]
        for reader in readers:
            reader.start()
        try:
            while any(len(one) < 3 for one in times):
                if not all(reader.is_alive() for reader in readers):
                    raise RuntimeError("a stream ended before the newcomers came")
                time.sleep(0.01)
            yield times
        finally:
            for call in calls:
                call.cancel()  # type: ignore[attr-defined]  # a call is also an iterator
            for reader in readers:
                reader.join()

    def _generate(self, num_tokens: int) -> Iterator[inference_pb2.GenerateResponse]:
        self._seed += 2  # the other stack has the numbers between
        (prompt,) = random_prompts(1, self._args.prompt_tokens, self._seed)
        params = types_pb2.SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        return self._stub.Generate(inference_pb2.GenerateRequest(prompt_token_ids=prompt, sampling_params=params))


def _read(call: Iterator[inference_pb2.GenerateResponse], times: list[float]) -> None:
    try:
        for message in call:
            times += [time.perf_counter()] * len(message.token_ids)
    except grpc.RpcError as error:
        if error.code() is not grpc.StatusCode.CANCELLED:
            raise


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--connector", default="nixl")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--newcomers", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    common = ["--model", args.model, "--device", "cpu", "--dtype", args.dtype, "--connector", args.connector]
    common += ["--listen", "127.0.0.1:0", "--log-level", "warning"]
    with contextlib.ExitStack() as processes:

        def start(what: str, *arguments: str) -> dict[str, str]:
            command = [sys.executable, "-m", "baton", what, *arguments]
            return processes.enter_context(running(command, what))

        prefill = start("prefill", *common, "--cpu-cores", str(cores[0]))["grpc"]
        stacks = {}
        for seed, (name, flags) in enumerate(COMPARED.items()):
            decode = start("decode", *common, "--cpu-cores", str(cores[-1]))["grpc"]
            ports = ("--http-listen", "127.0.0.1:0", "--grpc-listen", "127.0.0.1:0", "--log-level", "warning")
            router = start("router", "--prefill", prefill, "--decode", decode, *ports, *flags)
            stacks[name] = Stack(router["grpc"], args, 20_000 + seed)
        rows = interleave({name: stack.measure for name, stack in stacks.items()}, args.repeats)
    title = f"{args.dtype}, {args.streams} streams, newcomers of {args.prompt_tokens} prompt tokens, {args.connector}"
    one, other = COMPARED
    print_table(title, rows, ratio=(one, other))
    if args.json:
        write_json(args.json, rows)


if __name__ == "__main__":
    main()
