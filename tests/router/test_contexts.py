"""Decode workers whose contexts differ: the longest counts at the edge, and who gets a request can take it."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from protos.baton.v1 import worker_pb2
from tests.router.conftest import RunningRouter, StartRouter, StartWorker
from tests.support.fake_worker import FakeWorker


@pytest.fixture
async def pair(start_worker: StartWorker) -> tuple[FakeWorker, FakeWorker]:
    """The first has the shorter context and less to do."""
    short, long = await start_worker(), await start_worker()
    short.false_info, long.false_info = {"max_model_len": 64}, {"max_model_len": 128}
    long.num_requests_waiting = 5
    return short, long


async def ask(router: RunningRouter, max_tokens: int) -> httpx.Response:
    async with httpx.AsyncClient(base_url=router.url) as client:
        return await client.post("/v1/completions", json={"prompt": [1, 2, 3, 4], "max_tokens": max_tokens})


async def context(router: RunningRouter) -> int:
    async with httpx.AsyncClient(base_url=router.url) as client:
        (model,) = (await client.get("/v1/models")).json()["data"]
    return int(model["max_model_len"])


async def test_a_request_goes_to_a_worker_that_can_take_it(
    pair: tuple[FakeWorker, FakeWorker], start_router: StartRouter
) -> None:
    short, long = pair
    router = await start_router(short, long)
    assert await context(router) == 128
    for max_tokens, status in ((60, 200), (61, 200), (124, 200), (125, 400)):
        answer = await ask(router, max_tokens)
        assert answer.status_code == status, answer.text
    assert [request.sampling_params.max_tokens for request in short.requests] == [60]
    assert [request.sampling_params.max_tokens for request in long.requests] == [61, 124]
    assert answer.json()["error"]["param"] == "max_tokens"


async def test_the_context_follows_the_workers_that_are_ready(
    pair: tuple[FakeWorker, FakeWorker], start_router: StartRouter
) -> None:
    short, long = pair
    router = await start_router(short, long)
    for state, length in ((worker_pb2.WORKER_STATE_DRAINING, 64), (worker_pb2.WORKER_STATE_READY, 128)):
        long.change(state=state)
        async with asyncio.timeout(60):
            while await context(router) != length:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert (await ask(router, 61)).status_code == (200 if length == 128 else 400)
    for worker in pair:  # nobody is ready: what was known stays
        worker.change(state=worker_pb2.WORKER_STATE_DRAINING)
    async with httpx.AsyncClient(base_url=router.url) as client, asyncio.timeout(60):
        while (await client.get("/health")).status_code == 200:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    assert (await ask(router, 61)).status_code == 503
