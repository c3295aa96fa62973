"""Tools and embeddings in both clients, and the asyncio client, against a scripted router over real gRPC."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator

import pytest

from baton import AsyncClient, Client, Message, Tool
from baton.client.messages import ToolCall
from baton.client.report import Usage
from common.errors import InvalidArgumentError, UnavailableError
from common.types import FinishReason
from protos.baton.v1 import embed_pb2, inference_pb2, router_pb2
from tests.support.fake_router import FakeRouter, fake_router

TOOL = Tool("f", "Does it", {"type": "object", "properties": {"x": {"type": "integer"}}})
CALL = ToolCall("c1", "f", '{"x": 1}')


@pytest.fixture
def router() -> Iterator[tuple[FakeRouter, str]]:
    with fake_router() as both:
        yield both


def test_tools(router: tuple[FakeRouter, str]) -> None:
    servicer, address = router
    messages = [
        Message(role="user", content="Do", name="ada"),
        Message(role="assistant", tool_calls=[CALL], reasoning="why"),
        Message(role="tool", content="done", tool_call_id="c1"),
    ]
    with Client(address, timeout=60) as client:
        result = client.chat(messages, tools=[TOOL], tool_choice="f", chat_template_kwargs={"a": 1}).result()
    assert (result.reasoning, result.tool_calls, result.finish_reason) == ("hm", (CALL,), FinishReason.TOOL_CALLS)
    assert result.tool_calls[0].values() == {"x": 1}
    (request,) = servicer.requests
    assert (request.tool_choice.name, request.chat_template_kwargs) == ("f", '{"a": 1}')
    assert json.loads(request.tools[0].parameters) == TOOL.parameters
    assert request.messages[1].tool_calls[0].arguments == CALL.arguments
    assert (request.messages[1].reasoning_content, request.messages[2].tool_call_id) == ("why", "c1")
    assert [message.name for message in request.messages] == ["ada", "", ""]
    with pytest.raises(ValueError, match="no object"):
        ToolCall("c", "f", "[]").values()


def test_embeddings(router: tuple[FakeRouter, str]) -> None:
    servicer, address = router
    with Client(address, timeout=60) as client:
        vectors = client.embed(["a", [1, 2]], pooling="mean", normalize=False)
        assert (vectors, vectors.usage) == ([[1.0, 0.5]] * 2, Usage(prompt_tokens=6, cached_tokens=1))
        with pytest.raises(InvalidArgumentError, match="dimensions"):
            client.embed(["a"], dimensions=3)
        with pytest.raises(InvalidArgumentError, match="pooling"):
            client.embed(["a"], pooling="max")
    request = servicer.requests[0]
    assert (request.pooling, request.normalize) == (embed_pb2.POOLING_MEAN, False)
    assert [one.text or list(one.token_ids) for one in request.inputs] == ["a", [1, 2]]


async def test_the_asyncio_client(router: tuple[FakeRouter, str]) -> None:
    servicer, address = router
    async with AsyncClient(address, timeout=60) as client:
        answer = client.generate("one two", temperature=0)
        assert [chunk.text async for chunk in answer] == ["one ", "two ", ""]
        assert (await answer.result()).text == answer.text == "one two "
        called = await client.chat("Do", tools=[TOOL], tool_choice="required").result()
        assert called.tool_calls == (CALL,)
        assert servicer.requests[-1].tool_choice.mode == inference_pb2.ToolChoice.MODE_REQUIRED
        vectors = await client.embed(["a"])
        assert (vectors, vectors.usage) == ([[1.0, 0.5]], Usage(prompt_tokens=3, cached_tokens=1))
        with pytest.raises(InvalidArgumentError, match="dimensions"):
            await client.embed(["a"], dimensions=3)
        forever = client.generate("forever")
        async for _ in forever:
            break
        forever.cancel()
    async with AsyncClient("127.0.0.1:1", timeout=5) as nobody:
        with pytest.raises(UnavailableError):
            await nobody.models()


async def test_both_clients_have_all_calls(router: tuple[FakeRouter, str]) -> None:
    servicer, address = router
    with Client(address, timeout=60) as client:
        async with AsyncClient(address, timeout=60) as other:
            assert await other.fleet() == client.fleet()
            assert await other.models() == client.models()
            assert await other.tokenize("hé", model="m") == client.tokenize("hé", model="m")
            assert await other.detokenize([104], model="m") == client.detokenize([104], model="m") == "h"
    assert [request.model for request in servicer.tokenizing] == ["m"] * 4
    files = (inference_pb2.DESCRIPTOR, router_pb2.DESCRIPTOR)
    rpcs = [name for file in files for one in file.services_by_name.values() for name in one.methods_by_name]
    names = {re.sub(r"(?<=.)(?=[A-Z])", "_", name).lower().removeprefix("list_").removeprefix("get_") for name in rpcs}
    for kind in (Client, AsyncClient):
        assert {name for name in dir(kind) if not name.startswith("_")} == {*names, "close", "admin"}


async def test_what_one_reader_left_of_an_answer_is_there_for_the_next(router: tuple[FakeRouter, str]) -> None:
    """Messages are read ahead of who iterates: none is lost between two who do."""
    async with AsyncClient(router[1], timeout=60) as client:
        answer = client.generate("one two", temperature=0)
        first = aiter(answer)
        chunk = await anext(first)
        await asyncio.sleep(0.05)
        result = await answer.result()
        assert result.text.startswith(chunk.text)
        assert result.text == (await client.generate("one two", temperature=0).result()).text
        assert [one async for one in first] == []


async def test_sessions_and_reasons(router: tuple[FakeRouter, str]) -> None:
    servicer, address = router
    with Client(address, timeout=60, api_key="k") as client:
        client.generate("a", session="s 1", explain=True).result()
        client.chat("a", session="s 2").result()
        client.chat("a").result()
        with pytest.raises(InvalidArgumentError, match="session"):
            client.chat("a", session="\n")
    async with AsyncClient(address, timeout=60) as other:
        await other.generate("a", explain=True).result()
        await other.chat("a", session="s 3", explain=True).result()
    names = ("authorization", "x-session-id", "x-baton-explain")
    assert [tuple(metadata.get(name) for name in names) for metadata in servicer.metadata] == [
        ("Bearer k", "s 1", "true"),
        ("Bearer k", "s 2", None),
        ("Bearer k", None, None),
        (None, None, "true"),
        (None, "s 3", "true"),
    ]
