"""A request that is over is gone at once, however it ended: nothing of it waits for the garbage collector."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc
import httpx
import pytest

from protos.baton.v1 import inference_pb2, types_pb2
from tests.cyclic_garbage import left_of_requests, old_objects_are_left_out, only_collected
from tests.each_case import each_case
from tests.router.conftest import RunningRouter, sample
from tests.support.fake_worker import FakeWorker

__all__ = ["old_objects_are_left_out"]

WARM_UP = 5
NUM_ASKS = 3
LONG = types_pb2.SamplingParams(max_tokens=200)
Ask = Callable[[RunningRouter, httpx.AsyncClient], Awaitable[object]]


def post(status: int, **body: object) -> Ask:
    async def ask(_router: RunningRouter, client: httpx.AsyncClient) -> None:
        answer = await client.post("/v1/" + ("chat/completions" if "messages" in body else "completions"), json=body)
        assert answer.status_code == status

    return ask


def generate(code: grpc.StatusCode, **fields: object) -> Ask:
    async def ask(router: RunningRouter, _client: httpx.AsyncClient) -> None:
        call = router.inference.Generate(inference_pb2.GenerateRequest(**fields))  # type: ignore[arg-type]
        with contextlib.suppress(grpc.aio.AioRpcError):
            async for _ in call:
                pass
        assert await call.code() is code

    return ask


def chat(code: grpc.StatusCode, num_messages: int) -> Ask:
    async def ask(router: RunningRouter, _client: httpx.AsyncClient) -> None:
        call = router.inference.Chat(inference_pb2.ChatRequest(messages=[inference_pb2.ChatMessage()] * num_messages))
        assert await call.code() is code

    return ask


async def late(router: RunningRouter, _client: httpx.AsyncClient) -> None:
    call = router.inference.Generate(inference_pb2.GenerateRequest(prompt="x", sampling_params=LONG), timeout=0.05)
    with contextlib.suppress(grpc.aio.AioRpcError):
        async for _ in call:
            pass
    assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def cancelled(router: RunningRouter, _client: httpx.AsyncClient) -> None:
    call = router.inference.Generate(inference_pb2.GenerateRequest(prompt="x", sampling_params=LONG))
    await call.read()
    call.cancel()
    assert await call.code() is grpc.StatusCode.CANCELLED


async def left_alone(router: RunningRouter, _client: httpx.AsyncClient) -> None:
    """The client goes away in mid-answer."""
    body = {"prompt": "x", "max_tokens": 200, "stream": True}
    async with (
        httpx.AsyncClient(base_url=router.url) as client,
        client.stream("POST", "/v1/completions", json=body) as answer,
    ):
        async for _ in answer.aiter_lines():
            break


async def one_connection(router: RunningRouter, _client: httpx.AsyncClient) -> None:
    async with httpx.AsyncClient(base_url=router.url) as client:
        assert (await client.post("/v1/completions", json={"prompt": "x", "max_tokens": 9})).status_code == 200


ASKS: dict[str, Ask] = {
    "an answer": post(200, prompt="x", max_tokens=9),
    "a stream": post(200, prompt="x", max_tokens=9, stream=True),
    "many choices": post(200, prompt="x", max_tokens=9, n=3),
    "a wrong value": post(400, prompt="x", max_tokens=-1),
    "a wrong type": post(400, messages=[1]),
    "too many messages": post(400, messages=[{"role": "user", "content": ""}] * 600),
    "a long prompt": post(400, prompt=["word " * 4000]),
    "too many choices": post(400, prompt="x", n=100_000),
    "a message": generate(grpc.StatusCode.OK, prompt="x"),
    "a long message": generate(grpc.StatusCode.INVALID_ARGUMENT, prompt="word " * 4000),
    "too many messages in one": chat(grpc.StatusCode.INVALID_ARGUMENT, 600),
    "an empty message": generate(grpc.StatusCode.INVALID_ARGUMENT),
    "too late": late,
    "cancelled": cancelled,
    "left alone": left_alone,
    "a connection": one_connection,
}


@pytest.fixture
async def client(router: RunningRouter) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=router.url) as one:
        yield one


async def tasks_of_an_idle_router() -> int:
    """What they are most of a while: those of requests end soon after them, and the router's own may come and go."""
    await all_ended(sys.maxsize)
    seen = Counter[int]()
    for _ in range(15):
        seen[len(asyncio.all_tasks())] += 1
        await asyncio.sleep(0.01)
    return seen.most_common(1)[0][0]


async def all_ended(num_tasks: int) -> None:
    """Returns once no request is left, nor a task of one: some end by themselves, with nobody who waits for them. What
    still runs is not garbage yet."""
    async with asyncio.timeout(60):
        while sample("baton_router_requests_running") or len(asyncio.all_tasks()) > num_tasks:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@each_case("name", ASKS)
async def test_nothing_of_a_request_is_left(
    router: RunningRouter, worker: FakeWorker, client: httpx.AsyncClient, name: str
) -> None:
    worker.delay_s = 0.1 if name == "too late" else 0.003
    for _ in range(WARM_UP):
        await ASKS[name](router, client)
    num_tasks = await tasks_of_an_idle_router()
    with only_collected() as found:
        for _ in range(NUM_ASKS):
            await ASKS[name](router, client)
        await all_ended(num_tasks)
    assert not left_of_requests(found)
