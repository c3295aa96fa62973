"""Workers that say what cannot be: their requests go elsewhere or fail; the router, its sums and its limits stay."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import grpc
import httpx
import pytest
from google.rpc import error_details_pb2, status_pb2

from common.grpc.status import DETAILS_KEY, error_of_call
from common.peers import MAX_COUNT, milliseconds, seconds_to_wait
from common.types import WorkerLoad, WorkerRole
from protos.baton.v1 import decode_pb2, inference_pb2, types_pb2
from router.autoscaler.fleet_load import kv_usage
from router.fleet.endpoint import Endpoint
from router.fleet.registry import Registry
from router.policy.least_load import kv_headroom
from tests.router.conftest import RunningRouter, StartRouter, StartWorker, sample
from tests.router.test_registry import until
from tests.router.tiny_tokenizer import vocab_size
from tests.support.fake_worker import ANSWER, FakeWorker

MOST = 2**32 - 1
Spoil = Callable[[decode_pb2.DecodeEvent], None]


def outside_the_vocabulary(event: decode_pb2.DecodeEvent) -> None:
    event.tokens[0].token_id = MOST


def logprobs_outside_the_vocabulary(event: decode_pb2.DecodeEvent) -> None:
    event.tokens[0].top_logprobs.add(token_id=vocab_size(), logprob=-1.0)


def too_many_logprobs(event: decode_pb2.DecodeEvent) -> None:
    for _ in range(21):
        event.tokens[0].top_logprobs.add(token_id=1, logprob=-1.0)


def too_many_tokens(event: decode_pb2.DecodeEvent) -> None:
    for _ in range(300):  # more than the context has
        event.tokens.add(token_id=1)


async def ask(router: RunningRouter, **params: Any) -> tuple[str, inference_pb2.GenerateResponse]:
    request = inference_pb2.GenerateRequest(prompt="Hello", sampling_params=types_pb2.SamplingParams(**params))
    responses = [response async for response in router.inference.Generate(request)]
    return "".join(response.text for response in responses), responses[-1]


@pytest.mark.parametrize(
    "spoil", [outside_the_vocabulary, logprobs_outside_the_vocabulary, too_many_logprobs, too_many_tokens]
)
async def test_false_tokens_are_not_taken(start_worker: StartWorker, start_router: StartRouter, spoil: Spoil) -> None:
    """Another worker answers; if there is none left, none is available."""
    liar, honest = await start_worker(), await start_worker()
    honest.num_requests_waiting = 5
    liar.spoil = spoil
    router = await start_router(liar, honest)
    before = sample("baton_router_false_workers_total", about="tokens")
    text, last = await ask(router)
    assert text == ANSWER
    assert last.report.decode_worker == honest.address
    assert sample("baton_router_false_workers_total", about="tokens") == before + 1
    honest.spoil = spoil
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ask(router)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert " sends " in (caught.value.details() or "")


async def test_no_more_tokens_than_asked_for(start_worker: StartWorker, start_router: StartRouter) -> None:
    """Counted over all events, and over those of a worker before."""
    liar, honest = await start_worker(), await start_worker()
    honest.num_requests_waiting = 5
    router = await start_router(liar, honest)

    def goes_on(event: decode_pb2.DecodeEvent) -> None:
        event.finish_reason = types_pb2.FINISH_REASON_UNSPECIFIED
        event.tokens.add(token_id=event.tokens[0].token_id)

    liar.spoil = goes_on
    _, last = await ask(router, max_tokens=5)
    assert last.usage.completion_tokens == 5
    assert last.finish_reason == types_pb2.FINISH_REASON_LENGTH


async def test_false_numbers_spoil_no_report(worker: FakeWorker, start_router: StartRouter) -> None:
    router = await start_router(worker)

    def spoil(event: decode_pb2.DecodeEvent) -> None:
        for name in ("queue_ms", "prefill_ms", "handoff_ms", "first_decode_ms", "transfer_ms"):
            setattr(event.report.timings, name, {"queue_ms": math.nan, "prefill_ms": -1.0}.get(name, math.inf))
        for name in ("num_blocks_moved", "num_retries", "num_preemptions", "num_migrations", "num_handovers"):
            setattr(event.report, name, MOST)
        event.usage.cached_tokens = event.usage.prompt_tokens = event.usage.completion_tokens = MOST
        event.report.num_bytes_moved = 2**64 - 1
        event.report.decode_worker = "elsewhere"
        event.report.fallback_reason = event.report.prefill_worker = "x" * 10**6

    worker.spoil = spoil
    before = sample("baton_router_cached_prompt_tokens_total")
    text, last = await ask(router)
    assert text == ANSWER
    timings = last.report.timings
    assert timings.queue_ms == timings.prefill_ms == timings.transfer_ms == timings.handoff_ms == 0
    assert last.report.num_retries == last.report.num_preemptions == MAX_COUNT
    assert (last.report.num_migrations, last.report.num_handovers) == (0, 0)
    assert last.report.decode_worker == worker.address
    assert len(last.report.fallback_reason) == len(last.report.prefill_worker) == 500
    assert last.usage.cached_tokens == last.usage.prompt_tokens
    assert sample("baton_router_cached_prompt_tokens_total") == before + last.usage.prompt_tokens
    async with httpx.AsyncClient(base_url=router.url) as client:
        body = {"prompt": "x", "max_tokens": 3, "n": 2}
        answer = (await client.post("/v1/completions", json=body)).json()
        assert answer["baton"]["timings"]["queue_ms"] == 0


async def test_sums_over_workers_stay_in_range(start_worker: StartWorker, start_router: StartRouter) -> None:
    first, second = await start_worker(), await start_worker()
    second.num_requests_waiting = 5
    router = await start_router(first, second)

    def spoil(event: decode_pb2.DecodeEvent) -> None:
        event.report.num_preemptions = event.report.num_retries = MOST
        event.report.num_blocks_moved = MOST
        event.report.num_bytes_moved = 2**64 - 1

    first.spoil = second.spoil = spoil
    first.die_after = 3
    text, last = await ask(router)
    assert text == ANSWER
    assert last.report.num_migrations == 1
    assert last.report.num_preemptions == last.report.num_blocks_moved == MAX_COUNT


async def test_logprobs_that_are_no_numbers_are_numbers_in_json(worker: FakeWorker, start_router: StartRouter) -> None:
    router = await start_router(worker)

    def spoil(event: decode_pb2.DecodeEvent) -> None:
        event.tokens[0].logprob = math.nan
        event.tokens[0].top_logprobs[0].logprob = math.inf
        event.tokens[0].top_logprobs[1].logprob = -math.inf

    worker.spoil = spoil
    async with httpx.AsyncClient(base_url=router.url) as client:
        body = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 2, "max_tokens": 2}
        answer = (await client.post("/v1/chat/completions", json=body)).json()
    (first, _) = answer["choices"][0]["logprobs"]["content"]
    assert first["logprob"] == -9999
    assert [top["logprob"] for top in first["top_logprobs"]] == [9999, -9999]


@pytest.mark.parametrize(
    "false",
    [
        {"max_model_len": MOST},
        {"vocab_size": MOST},
        {"block_size": MOST},
        {"eos_token_ids": [MOST]},
        {"eos_token_ids": [1] * 2000},
        {"model": "m" * 2000},
        {"fingerprint": "f" * 2000},
        {"device_reason": "d" * 2000},
    ],
)
async def test_a_worker_that_describes_itself_falsely_serves_nothing(
    worker: FakeWorker, false: dict[str, object]
) -> None:
    worker.false_info = false
    registry = Registry([], [worker.address])
    before = sample("baton_router_false_workers_total", about="info")
    registry.start()
    try:
        (name,) = false
        await until(registry, lambda: name in registry.not_ready())
        assert registry.model is None
        await asyncio.sleep(0.5)  # it is asked again and again, and counted once
        assert sample("baton_router_false_workers_total", about="info") == before + 1
        worker.false_info = {}
        await until(registry, lambda: not registry.not_ready())
        assert registry.served().limits.max_model_len == 256
    finally:
        await registry.close()


def test_more_free_blocks_than_there_are() -> None:
    load = WorkerLoad(num_blocks=10, num_free_blocks=MOST, num_cached_blocks=MOST)
    endpoint = Endpoint(worker_id="w", role=WorkerRole.DECODE, address="a:1", load=load)
    assert kv_headroom(endpoint) == 1.0
    assert kv_usage(load) == 0.0


@pytest.mark.parametrize(
    ("said", "kept"), [(0.0, 0.0), (1.5, 1.5), (-1.0, 0.0), (1e300, 0.0), (math.nan, 0.0), (math.inf, 0.0)]
)
def test_times(said: float, kept: float) -> None:
    assert milliseconds(said) == kept


@pytest.mark.parametrize(("seconds", "kept"), [(2, 2.5), (2**62, 60.0), (-(2**62), 0.0)])
def test_delays_that_a_status_asks_for(seconds: int, kept: float) -> None:
    retry = error_details_pb2.RetryInfo()
    retry.retry_delay.seconds, retry.retry_delay.nanos = seconds, 500_000_000
    status = status_pb2.Status(code=8)
    status.details.add().Pack(retry)
    error = error_of_call("RESOURCE_EXHAUSTED", "full", [(DETAILS_KEY, status.SerializeToString())])
    assert (error.grpc_code, error.retry_after_s) == ("RESOURCE_EXHAUSTED", kept)


@pytest.mark.parametrize(
    ("said", "kept"), [(0.5, 0.5), (-1.0, 0.0), (1e300, 60.0), (math.nan, 60.0), (math.inf, 60.0), (-math.inf, 60.0)]
)
def test_delays(said: float, kept: float) -> None:
    assert seconds_to_wait(said, most=60.0) == kept
