"""A decode worker without an engine, for measuring what is in front of it.

    python -m bench.instant_worker TOKENIZER_DIR [STEP_MS]

Prints `ready grpc=ADDRESS`. The first token of an answer comes at once. The others come one by one, as of an engine:
all answers get their next token at the same moment, every STEP_MS milliseconds (10).
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import uvloop
from tokenizers import Tokenizer

from bench.steps import Steps
from common.grpc.options import MAX_MESSAGE_BYTES, worker_server_options
from common.grpc.server import add_handlers
from common.model_files import TOKENIZER_FILES
from protos.baton.v1 import decode_pb2, types_pb2, worker_pb2
from worker.many_calls import Caller, ManyCalls, OneCall

MODEL = "instant"
MAX_MODEL_LEN = 2**17
TEXT = "The quick brown fox jumps over the lazy dog, and 27 naïve cafés in Zürich open at 8 o'clock; nobody knows why. "
MAX_STREAMS = 20_000

Context = grpc.aio.ServicerContext[Any, Any]


class InstantWorker:
    def __init__(self, tokenizer_dir: Path, step_s: float) -> None:
        self._steps = Steps(step_s)
        self._many = ManyCalls(self._answer, MAX_STREAMS)
        self._files = {n: (tokenizer_dir / n).read_bytes() for n in TOKENIZER_FILES if (tokenizer_dir / n).is_file()}
        tokenizer = Tokenizer.from_str(self._files["tokenizer.json"].decode())
        self._vocab_size = tokenizer.get_vocab_size()
        ids = tokenizer.encode(TEXT, add_special_tokens=False).ids
        self._ids = ids
        tokens = [types_pb2.SampledToken(token_id=token_id) for token_id in ids]
        self._events = [decode_pb2.DecodeEvent(tokens=[token]) for token in tokens]
        report = types_pb2.RequestReport(timings=types_pb2.Timings(queue_ms=0.1))
        usage = types_pb2.Usage()
        self._first = [decode_pb2.DecodeEvent(tokens=[token], report=report, usage=usage) for token in tokens]
        length = types_pb2.FINISH_REASON_LENGTH
        self._last = [
            decode_pb2.DecodeEvent(tokens=[t], report=report, usage=usage, finish_reason=length) for t in tokens
        ]

    async def get_info(self, _request: bytes, _context: Context) -> bytes:
        return worker_pb2.WorkerInfo(
            worker_id=f"{MODEL}-{os.getpid()}",
            role=worker_pb2.WORKER_ROLE_DECODE,
            epoch="1",
            model=MODEL,
            fingerprint=MODEL,
            dtype="float32",
            max_model_len=MAX_MODEL_LEN,
            vocab_size=self._vocab_size,
            block_size=16,
        ).SerializeToString()

    async def get_tokenizer(self, _request: bytes, _context: Context) -> bytes:
        files = [worker_pb2.TokenizerFile(name=name, content=data) for name, data in self._files.items()]
        return worker_pb2.GetTokenizerResponse(files=files).SerializeToString()

    async def watch_load(self, _request: bytes, _context: Context) -> AsyncIterator[bytes]:
        load = worker_pb2.WorkerLoad(
            state=worker_pb2.WORKER_STATE_READY, num_blocks=2**20, num_free_blocks=2**20, epoch="1"
        ).SerializeToString()
        while True:
            yield load
            await asyncio.sleep(0.5)

    async def watch_blocks(self, _request: bytes, _context: Context) -> AsyncIterator[bytes]:
        yield worker_pb2.BlockChanges(epoch="1", starts_list=True).SerializeToString()
        await asyncio.Event().wait()

    async def decode(self, request: decode_pb2.DecodeRequest, context: Context) -> None:
        await self._answer(request, OneCall(context))

    async def decode_many(self, _requests: object, context: Context) -> None:
        await self._many.serve(context)

    async def _answer(self, request: decode_pb2.DecodeRequest, caller: Caller) -> None:
        num = request.sampling_params.max_tokens
        ids, count = self._ids, len(self._ids)
        if num > 1:
            await caller.write(self._first[0])
        for position in range(1, num):
            await self._steps.next()
            if position == num - 1:
                break
            if not caller.take_tokens([ids[position % count]]):
                await caller.write(self._events[position % count])
        await caller.write(self._last[(num - 1) % count])


async def serve(tokenizer_dir: Path, step_s: float) -> None:
    worker = InstantWorker(tokenizer_dir, step_s)
    server = grpc.aio.server(
        options=worker_server_options(max_message_bytes=MAX_MESSAGE_BYTES, max_streams=MAX_STREAMS)
    )
    unary, stream = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
    of_worker: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "GetInfo": unary(worker.get_info),
        "GetTokenizer": unary(worker.get_tokenizer),
        "WatchLoad": stream(worker.watch_load),
        "WatchBlocks": stream(worker.watch_blocks),
    }
    add_handlers(server, "baton.v1.WorkerService", of_worker)
    to_bytes = decode_pb2.DecodeManyResponse.SerializeToString
    of_decode: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "Decode": stream(worker.decode, decode_pb2.DecodeRequest.FromString, decode_pb2.DecodeEvent.SerializeToString),
        "DecodeMany": grpc.stream_stream_rpc_method_handler(
            worker.decode_many, decode_pb2.DecodeManyRequest.FromString, to_bytes
        ),
    }
    add_handlers(server, "baton.v1.DecodeService", of_decode)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"ready grpc=127.0.0.1:{port}", flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    uvloop.run(serve(Path(sys.argv[1]), float(sys.argv[2] if len(sys.argv) > 2 else 10) / 1000))
