"""A request that is over is gone at once: nothing of it waits for the garbage collector, which comes when it likes."""

from __future__ import annotations

import contextlib
import gc
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from types import FrameType

import grpc
import httpx
import pytest

from common.errors import BatonError
from protos.baton.v1 import inference_pb2
from tests.router.conftest import RunningRouter
from tests.router.fake_worker import FakeWorker

PACKAGES = ("router", "common", "worker")
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
    "an empty message": generate(grpc.StatusCode.INVALID_ARGUMENT),
}


@pytest.fixture
async def client(router: RunningRouter) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=router.url) as one:
        yield one


@contextlib.contextmanager
def only_collected() -> Iterator[list[object]]:
    """What the collector alone finds, of what is made inside; complete afterwards."""
    found: list[object] = []
    gc.collect()
    gc.disable()
    try:
        yield found
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found += gc.garbage
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@pytest.mark.parametrize("name", ASKS)
async def test_nothing_of_a_request_is_left(
    router: RunningRouter, worker: FakeWorker, client: httpx.AsyncClient, name: str
) -> None:
    await ASKS[name](router, client)
    with only_collected() as found:
        for _ in range(3):
            await ASKS[name](router, client)
    ours = Counter(type(one).__name__ for one in found if is_ours(one))
    assert not ours


def is_ours(one: object) -> bool:
    if isinstance(one, FrameType):
        return one.f_globals.get("__name__", "").partition(".")[0] in PACKAGES
    return isinstance(one, BatonError) or type(one).__module__.partition(".")[0] in PACKAGES
