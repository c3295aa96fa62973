"""What a decode worker's front costs: CPU time of its process, without the engine's, per request of one token and per
token of longer answers.

The front is a process of its own, before an engine whose device is simulated and takes the same time for every step.
All requests come in one `DecodeMany` stream, as from a router.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import grpc
import uvloop

from bench.measure import interleave, print_table
from bench.processes import running
from bench.router.process_cost import own_cpu_s
from common.batch_time import FEATURES, BatchTime, BatchTimeKey, Regime, RegimeTime, Table
from common.batch_time_file import encode
from common.config import WorkerSettings
from common.errors import InternalError
from common.grpc.options import CHANNEL_OPTIONS
from common.tracing import TraceContext, new_span_id, new_trace_id
from common.types import WorkerRole
from decode_service.servicer import add_service
from protos.baton.v1 import decode_pb2, decode_pb2_grpc, types_pb2
from worker.server import serve

NUM_PROMPT_TOKENS = 50
MAX_TOKENS = 1024  # more of them would need credit (`common.grpc.call_window`)
MAX_STREAMS = 256
NUM_BLOCKS = 2**15  # of 16 tokens: room for all of them


class Load:
    """A router's end of the stream: `num_streams` requests at any time for `seconds`; the last of them are read.
    `traced_share` of them, evenly spread, are traced."""

    def __init__(self, num_streams: int, max_tokens: int, seconds: float, traced_share: float = 0.0) -> None:
        self._traced_share = traced_share
        self._num_streams = num_streams
        self._max_tokens = max_tokens
        self._seconds = seconds
        self._call_ids = itertools.count(1)
        self.num_requests = self.num_tokens = self.num_messages = 0

    async def run(self, address: str) -> None:
        async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
            stub: decode_pb2_grpc.DecodeServiceAsyncStub = decode_pb2_grpc.DecodeServiceStub(channel)
            stream = stub.DecodeMany(wait_for_ready=True)
            end, num_open = time.monotonic() + self._seconds, self._num_streams
            await stream.write(self._starts(num_open))
            async for message in stream:
                num_ended = self._count(message)
                num_started = num_ended if time.monotonic() < end else 0
                if num_started:
                    await stream.write(self._starts(num_started))
                num_open += num_started - num_ended
                if not num_open:
                    break
            await stream.done_writing()

    def _starts(self, number: int) -> decode_pb2.DecodeManyRequest:
        return decode_pb2.DecodeManyRequest(
            starts=[
                decode_pb2.StartCall(
                    call_id=call_id,
                    request=decode_pb2.DecodeRequest(
                        request_id=f"{os.getpid()}-{id(self)}-{call_id}",
                        prompt_token_ids=[1] * NUM_PROMPT_TOKENS,
                        sampling_params=types_pb2.SamplingParams(max_tokens=self._max_tokens),
                        traceparent=self._traceparent(call_id),
                    ),
                )
                for call_id in itertools.islice(self._call_ids, number)
            ]
        )

    def _traceparent(self, call_id: int) -> str:
        is_traced = int(call_id * self._traced_share) > int((call_id - 1) * self._traced_share)
        return TraceContext(new_trace_id(), new_span_id()).traceparent if is_traced else ""

    def _count(self, message: decode_pb2.DecodeManyResponse) -> int:
        """Returns how many calls ended."""
        self.num_messages += 1
        self.num_tokens += len(message.token_ids)
        ended = [one.ended for one in message.events if one.HasField("ended")]
        if any(ended):
            raise InternalError("the worker failed a request")
        for one in message.events:
            if one.HasField("event"):
                self.num_tokens += len(decode_pb2.DecodeEvent.FromString(one.event).tokens)
        self.num_requests += len(ended)
        return len(ended)


def measure(address: str, pid: int, streams: int, tokens: int, seconds: float) -> dict[str, float]:
    figures = {}
    for max_tokens in (1, tokens):
        load = Load(streams, max_tokens, seconds)
        before = own_cpu_s(pid)
        uvloop.run(load.run(address))
        cpu_us = (own_cpu_s(pid) - before) * 1e6
        if max_tokens == 1:
            figures["µs per request of one token"] = cpu_us / load.num_requests
        else:
            figures[f"µs per token, {tokens} a request"] = cpu_us / load.num_tokens
            figures["tokens in one message"] = load.num_tokens / load.num_messages
    return figures


async def serve_front(step_ms: int, **values: str) -> None:
    """Steps of the engine take `step_ms`. `values`: of further settings."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder)
        times = folder / "times.json"
        times.write_bytes(encode(constant_time(step_ms / 1000)))
        given: dict[str, object] = {
            "listen": "127.0.0.1:0",
            "device": "simulated",
            "simulated_time": str(times),
            "num_blocks": NUM_BLOCKS,
            "max_num_seqs": MAX_STREAMS,
            "enable_prefix_caching": False,  # all prompts are equal
            "kv_dir": str(folder / "kv"),
            "drain_timeout": 0.0,
        }
        settings = WorkerSettings.model_validate({**given, "log_level": "warning", **values})

        def say(address: str) -> None:
            print(f"ready grpc={address}", flush=True)

        await serve(settings, WorkerRole.DECODE, folder, "simulated", [add_service], say)


def write_model(folder: Path) -> None:
    """A model's folder as far as a simulated device reads it."""
    vocabulary = {f"w{number}": number for number in range(512)}
    tokenizer = {"model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "w0"}, "added_tokens": []}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    (folder / "config.json").write_text('{"model_type": "llama", "max_position_embeddings": 2048}', encoding="utf-8")
    (folder / "model.safetensors").write_bytes(b"")


def constant_time(seconds: float) -> BatchTime:
    """A model of time for which every step takes `seconds`."""
    step = RegimeTime(layers=Table(seconds=(seconds,)), head=Table(), coefficients=(0.0,) * len(FEATURES))
    key = BatchTimeKey(
        spec="any", quantization="none", device="simulated", processor="none", kernels="none", num_threads=1
    )
    return BatchTime(key=key, regimes=dict.fromkeys(Regime, step))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.worker_front", description=__doc__)
    parser.add_argument("--streams", type=int, default=32, help=f"at most {MAX_STREAMS}")
    parser.add_argument("--tokens", type=int, default=256, help=f"of a longer answer, at most {MAX_TOKENS}")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement")
    parser.add_argument("--step-ms", type=int, default=10, help="between two tokens of a request")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        uvloop.run(serve_front(args.step_ms))
        return
    if not 2 <= args.tokens <= MAX_TOKENS:
        parser.error(f"--tokens: must be from 2 to {MAX_TOKENS}")
    if not 1 <= args.streams <= MAX_STREAMS:
        parser.error(f"--streams: must be from 1 to {MAX_STREAMS}")
    command = [sys.executable, "-m", "bench.worker_front", "--serve", "--step-ms", str(args.step_ms)]
    with running(command, "the worker") as fields:
        address, pid = fields["grpc"], int(fields["pid"])
        front = {"front": lambda: measure(address, pid, args.streams, args.tokens, args.seconds)}
        rows = interleave(front, args.repeats)
    print_table(f"CPU time of a worker's front, {args.streams} streams", rows)


if __name__ == "__main__":
    main()
