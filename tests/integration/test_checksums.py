"""Checksums between two workers: they travel with the blocks' references, and the reader trusts nothing else."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import msgspec
import pytest

import decode_service.servicer as decode_service
import prefill_service.servicer as prefill_service
from common.config import WorkerSettings
from common.grpc.options import MAX_MESSAGE_BYTES, worker_server_options
from common.types import WorkerRole
from kv_store.base import BlockRef
from protos.baton.v1 import decode_pb2, decode_pb2_grpc, types_pb2
from tests.chaos.tiny_model import random_prompt, write_tiny_model
from tests.nixl import needs_nixl
from worker import convert
from worker.shell import Worker

pytestmark = [pytest.mark.timeout(600), needs_nixl]

NUM_TOKENS = 100
NUM_KV_HEADS = 2  # of the tiny model
SERVICES = {WorkerRole.PREFILL: prefill_service, WorkerRole.DECODE: decode_service}


@asynccontextmanager
async def running_worker(model_dir: Path, role: WorkerRole) -> AsyncIterator[str]:
    """A front in this process, with an engine of its own; its address."""
    settings = WorkerSettings(
        connector="nixl", verify_checksums=True, dtype="float32", num_threads=1, num_blocks=64, chunk_size=32
    )
    worker = Worker(settings, role, model_dir, "tiny")
    await worker.engine.spawn()
    server = grpc.aio.server(options=worker_server_options(max_message_bytes=MAX_MESSAGE_BYTES, max_streams=1024))
    try:
        SERVICES[role].add_service(worker, server)
        worker.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await worker.wait_ready()
        await server.start()
        yield worker.address
    finally:
        await server.stop(0)
        await worker.engine.stop()


async def generate(address: str, name: str, prefill: list[str]) -> tuple[list[int], types_pb2.RequestReport]:
    request = decode_pb2.DecodeRequest(
        request_id=name,
        prompt_token_ids=random_prompt(random.Random(1), NUM_TOKENS),
        sampling_params=types_pb2.SamplingParams(temperature=0, max_tokens=8, ignore_eos=True),
        cache_salt=name,
        prefill_addresses=prefill,
    )
    tokens: list[int] = []
    report = types_pb2.RequestReport()
    async with grpc.aio.insecure_channel(address) as channel:
        async for event in decode_pb2_grpc.DecodeServiceStub(channel).Decode(request):
            tokens += [token.token_id for token in event.tokens]
            if event.HasField("report"):
                report = event.report
    return tokens, report


async def test_a_reader_refuses_what_the_checksums_in_its_messages_do_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny_model(tmp_path)
    announced: list[BlockRef] = []
    to_message = convert.block_ref_message

    def spy(ref: BlockRef) -> types_pb2.BlockRef:
        announced.append(ref)
        return to_message(ref)

    def alter(ref: BlockRef) -> types_pb2.BlockRef:
        """The last head's checksum of the prompt's third block is not that of its bytes."""
        *others, last = ref.checksums
        return to_message(msgspec.structs.replace(ref, checksums=(*others, last ^ (ref.index == 2))))

    async with (
        running_worker(tmp_path, WorkerRole.PREFILL) as prefill,
        running_worker(tmp_path, WorkerRole.DECODE) as decode,
    ):
        monkeypatch.setattr(convert, "block_ref_message", spy)
        tokens, report = await generate(decode, "right", [prefill])
        assert (report.fallback_reason, report.num_blocks_moved) == ("", -(-NUM_TOKENS // 16))
        assert {len(ref.checksums) for ref in announced} == {NUM_KV_HEADS}

        monkeypatch.setattr(convert, "block_ref_message", alter)
        same_tokens, report = await generate(decode, "wrong", [prefill])
        assert "fails its checksum" in report.fallback_reason
        assert same_tokens == tokens
