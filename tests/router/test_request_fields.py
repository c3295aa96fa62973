"""Fields beside the sampling parameters, through every interface to the worker."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from baton import LLM, AsyncClient, Client
from protos.baton.v1 import inference_pb2
from tests.router.conftest import RunningRouter
from tests.support.fake_worker import FakeWorker
from text.tokenizer import Tokenizer

SOON = -5


async def test_priority_over_rest(router: RunningRouter, worker: FakeWorker) -> None:
    messages: Any = [{"role": "user", "content": "Hi"}]
    extra = {"priority": SOON}
    await router.openai.chat.completions.create(model="tiny", messages=messages, extra_body=extra)
    await router.openai.completions.create(model="tiny", prompt="Hi", extra_body=extra)
    await router.openai.responses.create(model="tiny", input="Hi", extra_body=extra)
    assert [request.priority for request in worker.requests] == [SOON] * 3


async def test_priority_over_grpc(router: RunningRouter, worker: FakeWorker) -> None:
    chat = inference_pb2.ChatRequest(messages=[inference_pb2.ChatMessage(role="user", content="Hi")], priority=SOON)
    async for _ in router.inference.Generate(inference_pb2.GenerateRequest(prompt="Hi", priority=SOON)):
        pass
    async for _ in router.inference.Chat(chat):
        pass
    assert [request.priority for request in worker.requests] == [SOON] * 2


async def test_priority_from_python(router: RunningRouter, worker: FakeWorker) -> None:
    def ask() -> None:
        with Client(router.grpc_address) as client:
            client.generate("Hi", priority=SOON).result()
            client.chat("Hi", priority=SOON).result()
        with LLM(target=router.grpc_address) as llm:
            llm.generate("Hi", use_tqdm=False, priority=[SOON])
            llm.chat("Hi", use_tqdm=False, priority=[SOON])

    await asyncio.to_thread(ask)
    async with AsyncClient(router.grpc_address) as client:
        await client.generate("Hi", priority=SOON).result()
        await client.chat("Hi", priority=SOON).result()
    assert [request.priority for request in worker.requests] == [SOON] * 6


async def test_special_tokens(router: RunningRouter, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokenizer of these tests has none of its own, so what it is asked is looked at."""
    asked: list[bool] = []
    encode = Tokenizer.encode

    def recorded(self: Tokenizer, text: str, *, add_special_tokens: bool = True) -> list[int]:
        asked.append(add_special_tokens)
        return encode(self, text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", recorded)

    def ask(given: dict[str, Any]) -> None:
        with Client(router.grpc_address) as client:
            client.generate("Hi", **given).result()
            client.embed(["Hi"], **given)
            client.evict_prefix(prompt="Hi", **given)
            client.tokenize("Hi", **given)

    cases: tuple[tuple[dict[str, Any], bool], ...] = (
        ({}, True),
        ({"add_special_tokens": True}, True),
        ({"add_special_tokens": False}, False),
    )
    for given, expected in cases:
        await asyncio.to_thread(ask, given)
        async with AsyncClient(router.grpc_address) as client:
            await client.generate("Hi", **given).result()
            await client.embed(["Hi"], **given)
            await client.evict_prefix(prompt="Hi", **given)
        async with httpx.AsyncClient(base_url=router.url) as rest:
            for path, body in (
                ("/v1/completions", {"prompt": "Hi"}),
                ("/v1/embeddings", {"input": "Hi"}),
                ("/v1/cache/evict", {"prompt": "Hi"}),
                ("/tokenize", {"text": "Hi"}),
            ):
                assert (await rest.post(path, json={**body, **given})).status_code == 200
        assert asked == [expected] * 11
        asked.clear()
