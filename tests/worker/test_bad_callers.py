"""Values on the wire that no router or decode worker of ours sends: refused by name, before an engine sees them."""

from __future__ import annotations

import math
from typing import Any

import grpc
import pytest

from protos.baton.v1 import decode_pb2, prefill_pb2, types_pb2, worker_pb2
from tests.worker.conftest import RunningWorker, StartWorker, decode_request
from tests.worker.words import ANSWER, VOCAB_SIZE

BAD_SAMPLING: list[tuple[str, dict[str, Any]]] = [
    ("logit_bias", {"logit_bias": {-1: 5.0}}),
    ("logit_bias", {"logit_bias": {VOCAB_SIZE: 5.0}}),
    ("logit_bias", {"logit_bias": {1: math.nan}}),
    ("stop_token_ids", {"stop_token_ids": [-1]}),
    ("stop_token_ids", {"stop_token_ids": [1] * 5000}),
    ("logprobs", {"logprobs": 2**31 - 1}),
    ("logprobs", {"logprobs": -1}),
    ("temperature", {"temperature": math.inf}),
    ("temperature", {"temperature": -1.0}),
    ("top_p", {"top_p": math.nan}),
    ("repetition_penalty", {"repetition_penalty": 0.0}),
    ("presence_penalty", {"presence_penalty": 1e30}),
    ("max_tokens", {"max_tokens": 2**31 - 1}),
    ("max_tokens", {"max_tokens": -(2**31)}),
    ("min_tokens", {"min_tokens": -1}),
]


def sampling(fields: dict[str, Any]) -> types_pb2.SamplingParams:
    return types_pb2.SamplingParams(**{"max_tokens": 4, **fields})


BAD_DECODES: list[tuple[str, dict[str, Any]]] = [
    *((f"sampling_params.{field}", {"sampling_params": sampling(fields)}) for field, fields in BAD_SAMPLING),
    ("prompt_token_ids", {"prompt_token_ids": []}),
    ("prompt_token_ids", {"prompt_token_ids": [1, 2**32 - 1]}),
    ("prompt_token_ids", {"prompt_token_ids": [1] * 200_000}),
    ("output_token_ids", {"output_token_ids": [VOCAB_SIZE]}),
    ("prefill_addresses", {"prefill_addresses": ["127.0.0.1:1"] * 1000}),
    ("request_id", {"request_id": "x" * 5000}),
    ("request_id", {"request_id": "a\nforged log line"}),
    ("cache_salt", {"cache_salt": "x" * 5000}),
    ("priority", {"priority": -3}),
    ("retain.seconds", {"retain": types_pb2.Retain(seconds=math.inf)}),
    ("tenant", {"tenant": "x" * 5000}),
    ("targets", {"targets": types_pb2.LatencyTargets()}),
    ("targets.tpot_ms", {"targets": types_pb2.LatencyTargets(ttft_ms=1, tpot_ms=math.nan)}),
    ("age_ms", {"age_ms": math.inf}),
]


async def is_well(worker: RunningWorker) -> bool:
    return bool(await worker.decode.Decode(decode_request(ANSWER), timeout=20).read())


async def test_decode_requests_that_no_router_sends(start_worker: StartWorker) -> None:
    worker = await start_worker()
    for field, changes in BAD_DECODES:
        request: decode_pb2.DecodeRequest = decode_request(ANSWER, **changes)
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await worker.decode.Decode(request, timeout=20).read()
        assert failed.value.code() is grpc.StatusCode.INVALID_ARGUMENT, (field, failed.value)
        assert (failed.value.details() or "").startswith(f"{field}: ")
    assert await is_well(worker)


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("first_block", {"first_block": 2**32 - 1}),
        ("first_block", {"first_block": 3}),
        ("stop_block", {"first_block": 1, "stop_block": 1}),
        ("stop_block", {"stop_block": 2**32 - 1}),
        ("peer", {"first_block": 1, "peer": bytes(2 << 20)}),
        ("prompt_token_ids", {"prompt_token_ids": [VOCAB_SIZE]}),
        ("request_id", {"request_id": "x" * 5000}),
        ("priority", {"priority": 7}),
        ("retain.seconds", {"retain": types_pb2.Retain(seconds=-1.0)}),
        ("targets.ttft_ms", {"targets": types_pb2.LatencyTargets(ttft_ms=-1)}),
        ("age_ms", {"age_ms": -1.0}),
        ("sampling_params.logit_bias", {"sampling_params": types_pb2.SamplingParams(logit_bias={-1: 1.0})}),
    ],
)
async def test_prefill_requests_that_no_decode_worker_sends(
    start_worker: StartWorker, field: str, changes: dict[str, object]
) -> None:
    worker = await start_worker()
    start = {"request_id": "p", "prompt_token_ids": [ANSWER] * 8, **changes}
    call = worker.prefill.Prefill(timeout=20)
    await call.write(prefill_pb2.PrefillRequest(start=prefill_pb2.PrefillStart(**start)))  # type: ignore[arg-type]
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await call.read()
    assert failed.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (failed.value.details() or "").startswith(f"{field}: ")
    assert await is_well(worker)


async def test_messages_that_are_none(start_worker: StartWorker, caplog: pytest.LogCaptureFixture) -> None:
    """Of each kind of call; none counts as a failure of the worker, or leaves a stack in its log."""
    worker = await start_worker()
    rubbish = b"\x0a\xff"
    channel: Any = worker.channel  # bytes in, bytes out
    calls = (
        channel.unary_unary("/baton.v1.WorkerService/GetStatus")(rubbish, timeout=20),
        channel.unary_stream("/baton.v1.WorkerService/WatchLoad")(rubbish, timeout=20).read(),
        channel.unary_stream("/baton.v1.DecodeService/Decode")(rubbish, timeout=20).read(),
        channel.stream_stream("/baton.v1.PrefillService/Prefill")(iter([rubbish]), timeout=20).read(),
        channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")(
            iter([rubbish]), timeout=20
        ).read(),
    )
    for call in calls:
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await call
        assert failed.value.code() is grpc.StatusCode.INVALID_ARGUMENT, failed.value
        assert (failed.value.details() or "").startswith("request: ")
    assert "Traceback" not in caplog.text
    assert await is_well(worker)


@pytest.mark.parametrize("timeout_s", [math.nan, math.inf, -1.0])
async def test_a_drain_takes_a_number_of_seconds(start_worker: StartWorker, timeout_s: float) -> None:
    worker = await start_worker()
    with pytest.raises(grpc.aio.AioRpcError, match="timeout_s"):
        await worker.worker.Drain(worker_pb2.DrainRequest(timeout_s=timeout_s))
    assert await is_well(worker)


async def test_hints_about_caches(start_worker: StartWorker) -> None:
    worker = await start_worker()
    good = {"action": worker_pb2.CACHE_ACTION_EVICT, "block_hashes": bytes(32)}
    told = await worker.worker.HintCache(worker_pb2.HintCacheRequest(**good))  # type: ignore[arg-type]
    assert (told.num_device_blocks, told.failure) == (2, "it is a fake")
    for field, changes in (
        ("action", {"action": 0}),
        ("block_hashes", {"block_hashes": bytes(17)}),
        ("seconds", {"seconds": math.inf}),
        ("tenant", {"tenant": "x" * 5000}),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await worker.worker.HintCache(worker_pb2.HintCacheRequest(**{**good, **changes}))  # type: ignore[arg-type]
        assert failed.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert (failed.value.details() or "").startswith(f"{field}: ")
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await worker.worker.HintCache(worker_pb2.HintCacheRequest(**good, fingerprint="another"))  # type: ignore[arg-type]
    assert failed.value.code() is grpc.StatusCode.FAILED_PRECONDITION
