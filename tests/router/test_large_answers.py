"""Answers that are kept until they are whole: weighed in full, held in the gate, and sent in parts."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import grpc
import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos.baton.v1 import inference_pb2, types_pb2
from router.api.rest.openai import large_json
from router.api.rest.openai.embeddings import EmbeddingsBody, embeddings_parts
from router.api.rest.openai.large_json import PART_BYTES, JsonList, json_parts
from router.running import embedding
from router.running.embedding import MAX_AT_ONCE, Embedded, EmbedRequest
from router.running.request import Prompt
from tests.router.conftest import RunningRouter, StartRouter
from tests.router.test_answer import requests
from tests.support.fake_worker import FakeWorker

LOGPROBS = ["message.output_text.logprobs"]
CHAT = {"messages": [{"role": "user", "content": "x"}], "logprobs": True}
LARGE = {**CHAT, "n": 8, "max_tokens": 200, "top_logprobs": 20}  # some 2 MiB of JSON
SMALL = {**CHAT, "max_tokens": 2}


@given(
    lists=st.lists(st.lists(st.lists(st.text(), max_size=4), max_size=4), max_size=4),
    text=st.text() | st.just("\0[\0]"),
    part_bytes=st.integers(1, 60),
)
def test_parts_are_the_whole(lists: list[list[list[str]]], text: str, part_bytes: int) -> None:
    made = []
    for pieces in lists:
        made.append(JsonList())
        for piece in pieces:
            made[-1].add(piece)
    content: dict[str, object] = {"text": text, "lists": [{"of": one, "text": text} for one in made]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(large_json, "PART_BYTES", part_bytes)
        parts = list(json_parts(content, b"<", b">"))
    expected = [{"of": [entry for piece in pieces for entry in piece], "text": text} for pieces in lists]
    whole = b"".join(parts)
    assert whole[:1] + whole[-1:] == b"<>"
    assert json.loads(whole[1:-1]) == {"text": text, "lists": expected}
    assert all(len(part) >= part_bytes for part in parts[:-1])
    assert all(parts)


def test_entries_are_not_joined_again() -> None:
    """A list of many entries is never one piece of bytes."""
    entries = JsonList()
    for _ in range(100):
        entries.add(["x" * 10_000])
    sizes = [len(part) for part in json_parts({"entries": entries})]
    assert len(sizes) >= 3
    assert max(sizes) < PART_BYTES + 20_000


@pytest.mark.parametrize(
    ("path", "body", "is_allowed"),
    [
        ("completions", {"prompt": "x", "max_tokens": 20, "logprobs": 4}, True),
        ("completions", {"prompt": "x", "max_tokens": 21, "logprobs": 4}, False),
        ("completions", {"prompt": "x", "max_tokens": 50, "logprobs": 4, "stream": True}, True),
        ("chat/completions", {**CHAT, "max_tokens": 21, "top_logprobs": 4}, False),
        ("chat/completions", {**CHAT, "max_tokens": 50, "top_logprobs": 4, "stream": True}, True),
        ("responses", {"input": "x", "include": LOGPROBS, "top_logprobs": 4, "max_output_tokens": 21}, False),
        (  # its last events repeat all of it
            "responses",
            {"input": "x", "include": LOGPROBS, "top_logprobs": 4, "max_output_tokens": 21, "stream": True},
            False,
        ),
    ],
)
async def test_each_logprob_of_a_whole_answer_counts(
    worker: FakeWorker, start_router: StartRouter, path: str, body: dict[str, object], is_allowed: bool
) -> None:
    router = await start_router(worker, max_answer_tokens=100)
    async with httpx.AsyncClient(base_url=router.url) as client:
        answer = await client.post(f"/v1/{path}", json=body)
    assert answer.status_code == (200 if is_allowed else 400), answer.text
    assert is_allowed or "count as 105" in answer.text


def compared(max_tokens: int, logprobs: int, best_of: int) -> inference_pb2.GenerateRequest:
    params = types_pb2.SamplingParams(max_tokens=max_tokens, logprobs=logprobs)
    choices = inference_pb2.Choices(n=1, best_of=best_of)
    return inference_pb2.GenerateRequest(prompt="x", sampling_params=params, choices=choices)


async def test_each_logprob_of_compared_answers_counts(worker: FakeWorker, start_router: StartRouter) -> None:
    router = await start_router(worker, max_answer_tokens=100)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await router.inference.Generate(compared(11, 4, 2)).read()
    assert "sampling_params.max_tokens" in (caught.value.details() or "")
    assert "count as 110" in (caught.value.details() or "")
    assert [one async for one in router.inference.Generate(compared(10, 4, 2))]


async def test_whole_answers_are_held_in_the_gate(worker: FakeWorker, start_router: StartRouter) -> None:
    """With too little room they are refused, and leave it as it was; what is streamed needs none."""
    worker.answer = worker.answer * 12
    router = await start_router(worker, max_buffered_mb=1)
    async with httpx.AsyncClient(base_url=router.url) as client:
        for _ in range(2):
            answer = await client.post("/v1/chat/completions", json=LARGE)
            assert answer.status_code == 429, answer.text[:500]
            assert "bytes of requests and answers" in answer.text
        assert (await client.post("/v1/chat/completions", json={**LARGE, "stream": True})).status_code == 200
        body = {"input": "x", "include": LOGPROBS, "top_logprobs": 20, "max_output_tokens": 200}
        assert (await client.post("/v1/responses", json=body)).status_code == 200
    for _ in range(2):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await router.inference.Generate(compared(200, 20, 8)).read()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert [one async for one in router.inference.Generate(compared(2, 20, 2))]


async def test_large_answers_are_sent_in_parts(worker: FakeWorker, router: RunningRouter) -> None:
    worker.answer = worker.answer * 12
    async with httpx.AsyncClient(base_url=router.url) as client:
        large = await client.post("/v1/chat/completions", json=LARGE)
        small = await client.post("/v1/chat/completions", json=SMALL)
    assert large.headers["transfer-encoding"] == "chunked"
    assert large.headers["content-type"] == small.headers["content-type"] == "application/json"
    assert large.headers["x-request-id"] != small.headers["x-request-id"]
    assert int(small.headers["content-length"]) == len(small.content)
    choices = large.json()["choices"]
    assert len(choices) == 8
    assert len(large.content) > 2 * PART_BYTES
    for choice in choices:
        tokens = [one["token"] for one in choice["logprobs"]["content"]]
        assert "".join(tokens).startswith(choice["message"]["content"])
        assert len(tokens) > 50


async def test_vectors_of_all_inputs_are_bounded(
    worker: FakeWorker, router: RunningRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one says how long all are, and then no more are asked for."""
    monkeypatch.setattr(embedding, "MAX_VALUES", 299)
    async with httpx.AsyncClient(base_url=router.url) as client:
        answer = await client.post("/v1/embeddings", json={"input": ["x"] * 100})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input"), answer.text
        assert "so 99 entries" in answer.text
        assert len(worker.embedded) <= 2 * MAX_AT_ONCE
        assert (await client.post("/v1/embeddings", json={"input": ["x"] * 99})).status_code == 200
        worker.embedded.clear()
        answer = await client.post("/v1/embeddings", json={"input": ["x"] * 3, "dimensions": 100})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input"), answer.text
    assert not worker.embedded
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await router.inference.Embed(inference_pb2.EmbedRequest(inputs=[inference_pb2.EmbedInput(text="x")] * 100))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_vectors_are_held_in_the_gate(worker: FakeWorker, start_router: StartRouter) -> None:
    router = await start_router(worker, max_buffered_mb=0.1)
    async with httpx.AsyncClient(base_url=router.url) as client:
        for _ in range(2):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(embedding, "VALUE_BYTES", 1000)  # as if they were long
                answer = await client.post("/v1/embeddings", json={"input": ["x"] * 100})
            assert answer.status_code == 429, answer.text
            assert (await client.post("/v1/embeddings", json={"input": ["x"] * 100})).status_code == 200


@pytest.mark.parametrize("encoding_format", ["float", "base64"])
async def test_vectors_are_written_one_by_one(encoding_format: str) -> None:
    """Others have their turn after each, and no part holds many of them."""
    num_turns = 0

    async def others() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    (request,) = requests(1)
    prompts = [Prompt([5], "input")] * 50
    wanted = EmbedRequest(request_id="r", model=request.model, prompts=prompts, arrived_at=0.0, deadline=1e9)
    embedded = [Embedded([float(number)] * 30, 0) for number in range(50)]
    running = asyncio.create_task(others())
    body = EmbeddingsBody(input="x", encoding_format=encoding_format)
    parts = [part async for part in embeddings_parts(body, wanted, embedded, part_bytes=500)]
    running.cancel()
    assert num_turns >= 49
    assert len(parts) > 5
    assert all(500 <= len(part) < 1000 for part in parts[:-1])
    whole: Any = msgspec.json.decode(b"".join(parts))
    assert [one["index"] for one in whole["data"]] == list(range(50))
    if encoding_format == "float":
        assert [one["embedding"] for one in whole["data"]] == [one.values for one in embedded]
    assert whole["usage"]["prompt_tokens"] == 50
