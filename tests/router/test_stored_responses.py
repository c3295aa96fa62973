"""Conversations that the router stores: `/v1/responses` with `previous_response_id`, by the official client."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest
from openai.types.responses import ResponseFunctionToolCall

from common.config import RouterSettings
from common.errors import StartupError
from protos.baton.v1 import worker_pb2
from router.api.rest.openai import stored_responses
from router.limits.admission import BODY_OVERHEAD_BYTES, BYTES_PER_TOKEN
from router.responses.store import ResponseStore
from router.running.retries import DispatchLimits
from router.server import serve
from tests.each_case import each_case
from tests.router import chat_templates
from tests.router.conftest import SETTINGS, RunningRouter, StartRouter, StartWorker, sample
from tests.router.test_prefix_hints import names
from tests.router.test_responses import LOGPROBS, TOOL
from tests.router.test_tools import prompt_of
from tests.router.tiny_tokenizer import ids_of
from tests.support.fake_worker import FakeWorker

CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'


@pytest.fixture
async def worker(start_worker: StartWorker) -> FakeWorker:
    worker = await start_worker()
    worker.chat_template = chat_templates.HERMES
    worker.answer = ids_of("Paris.")
    worker.false_info = {"max_model_len": 1024}
    return worker


@pytest.fixture
async def router(worker: FakeWorker, start_router: StartRouter, tmp_path: Path) -> RunningRouter:
    return await start_router(worker, response_file=str(tmp_path / "responses.db"))


def ask(router: RunningRouter, text: Any, previous: Any = None, **given: Any) -> Any:
    """`previous`: a response."""
    if previous is not None:
        given["previous_response_id"] = previous.id
    return router.openai.responses.create(model="tiny", input=text, **given)


def turn(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


async def test_a_conversation_goes_on(router: RunningRouter, worker: FakeWorker) -> None:
    first = await ask(router, "Where?", instructions="Be brief", metadata={"a": "b"})
    worker.answer = ids_of("In May.")
    second = await ask(router, [{"role": "user", "content": "When?"}], first)
    assert (first.store, second.store, second.previous_response_id) == (True, True, first.id)
    said = turn("user", "Where?") + turn("assistant", "Paris.") + turn("user", "When?")
    assert prompt_of(worker).startswith(said), "instructions are those of one request alone"
    third = await ask(router, "Why?", second, instructions="Be long")
    said = turn("system", "Be long") + said + turn("assistant", "In May.") + turn("user", "Why?")
    assert prompt_of(worker).startswith(said)
    branch = await ask(router, "How?", first)
    assert turn("assistant", "Paris.") + turn("user", "How?") in prompt_of(worker)
    assert len({one.id for one in (first, second, third, branch)}) == 4
    again = await router.openai.responses.retrieve(first.id)
    assert again.to_dict() == first.to_dict()
    assert (again.output_text, again.metadata) == ("Paris.", {"a": "b"})


async def test_what_was_asked_is_listed(router: RunningRouter) -> None:
    first = await ask(router, "Where?")
    second = await ask(router, [{"role": "user", "content": "When?", "id": "mine"}], first)
    listed: list[Any] = [
        item async for item in router.openai.responses.input_items.list(second.id, limit=1, order="asc")
    ]
    texts = [item.content[0].text for item in listed if item.type == "message"]
    assert texts == ["Where?", "Paris.", "When?"]
    assert [item.id for item in listed][1:] == [first.output[0].id, "mine"]
    backwards = [item.id async for item in router.openai.responses.input_items.list(second.id)]
    assert backwards == [item.id for item in listed][::-1]
    page = await router.openai.responses.input_items.list(second.id, limit=2, order="asc")
    assert (len(page.data), page.has_more) == (2, True)


async def test_a_call_and_its_result(router: RunningRouter, worker: FakeWorker) -> None:
    worker.answer = ids_of("<think>hm</think>Yes." + CALL)
    async with router.openai.responses.stream(model="tiny", input="Do", tools=[TOOL], max_output_tokens=200) as stream:
        events = [event async for event in stream]
    first = events[-1].response  # type: ignore[union-attr]
    assert {event.response.id for event in events if hasattr(event, "response")} == {first.id}
    call = first.output[-1]
    assert isinstance(call, ResponseFunctionToolCall)
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "done"}
    await ask(router, [result], first, tools=[TOOL])
    assert turn("assistant", "<think>hm</think>Yes." + CALL) + turn("tool", "done") in prompt_of(worker)
    answer: Any = None
    with pytest.raises(openai.BadRequestError) as refused:
        answer = await ask(router, [{**result, "call_id": ""}], first)
    assert refused.value.param == "input[0].call_id", answer


async def test_a_cut_answer_is_continued(router: RunningRouter, worker: FakeWorker) -> None:
    worker.answer = ids_of("In the south of France.")
    first = await ask(router, "Where?", max_output_tokens=3)
    assert first.status == "incomplete"
    await ask(router, "On", first)
    assert turn("assistant", first.output_text) + turn("user", "On") in prompt_of(worker)
    assert (await router.openai.responses.retrieve(first.id)).status == "incomplete"


async def test_only_what_is_continued_counts(router: RunningRouter, worker: FakeWorker) -> None:
    """What an answer repeats of its request, and its logprobs, are of no conversation."""
    schema = {"type": "object", "description": "It says this and that. " * 800}
    form = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
    last: Any = None
    for _ in range(9):
        last = await ask(router, "Where?", last, include=LOGPROBS, top_logprobs=2, extra_body={"text": form})
    assert len(last.to_json()) * 8 > BODY_OVERHEAD_BYTES + 1024 * BYTES_PER_TOKEN, "more than a body may have"
    assert last.output[0].content[0].logprobs
    listed: list[Any] = [item async for item in router.openai.responses.input_items.list(last.id, order="asc")]
    assert [item.content[0].text for item in listed if item.type == "message"] == 8 * ["Where?", "Paris."] + ["Where?"]


async def test_without_store(router: RunningRouter, worker: FakeWorker) -> None:
    first = await ask(router, "Where?")
    second = await ask(router, "When?", first, store=False)
    assert second.store is False
    assert turn("user", "Where?") in prompt_of(worker)
    with pytest.raises(openai.NotFoundError):
        await router.openai.responses.retrieve(second.id)
    with pytest.raises(openai.BadRequestError):
        await ask(router, "Why?", second)


async def test_deleted(router: RunningRouter) -> None:
    first = await ask(router, "Where?")
    second = await ask(router, "When?", first)
    await router.openai.responses.delete(first.id)
    for call in (
        router.openai.responses.retrieve(first.id),
        router.openai.responses.delete(first.id),
        router.openai.responses.cancel(first.id),
        router.openai.responses.input_items.list(second.id),
    ):
        with pytest.raises(openai.NotFoundError) as refused:
            await call
        assert refused.value.param == "response_id"
    for previous in (first, second):
        with pytest.raises(openai.BadRequestError) as wrong:
            await ask(router, "Why?", previous)
        assert (wrong.value.param, wrong.value.code) == ("previous_response_id", "previous_response_not_found")


@each_case(
    ("body", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"previous_response_id": f"resp_{0:040x}"}, "previous_response_id"),
        ({"previous_response_id": 5}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
    ],
)
async def test_what_is_refused(router: RunningRouter, body: dict[str, object], param: str) -> None:
    async with httpx.AsyncClient(base_url=router.url) as client:
        answer = await client.post("/v1/responses", json={"input": "x", **body})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


@each_case(
    ("method", "path", "status", "param"),
    [
        ("GET", "?stream=true", 400, "stream"),
        ("GET", "?include[]=reasoning.encrypted_content", 400, "include[]"),
        ("GET", "/input_items?order=up", 400, "order"),
        ("GET", "/input_items?limit=0", 400, "limit"),
        ("GET", "/input_items?after=x", 400, "after"),
        ("POST", "/cancel", 400, "response_id"),
    ],
)
async def test_what_is_refused_of_a_stored_one(
    router: RunningRouter, method: str, path: str, status: int, param: str
) -> None:
    response_id = (await ask(router, "x")).id
    async with httpx.AsyncClient(base_url=router.url) as client:
        answer = await client.request(method, f"/v1/responses/{response_id}{path}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text


async def test_tenants_see_their_own(worker: FakeWorker, start_router: StartRouter, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-alice tenant=research\nsk-bob tenant=research\nsk-eve tenant=sales\n")
    router = await start_router(worker, response_file=str(tmp_path / "responses.db"), api_keys_file=str(keys))
    alice, bob, eve = (router.openai.with_options(api_key=f"sk-{name}").responses for name in ("alice", "bob", "eve"))
    first = await alice.create(model="tiny", input="Where?")
    for call in (eve.retrieve(first.id), eve.delete(first.id), eve.input_items.list(first.id)):
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            await call
    with pytest.raises(openai.BadRequestError, match=r"previous_response_id: .* does not exist"):
        await eve.create(model="tiny", input="x", previous_response_id=first.id)
    second = await bob.create(model="tiny", input="When?", previous_response_id=first.id)
    assert second.previous_response_id == first.id


async def test_it_survives_a_restart(worker: FakeWorker, start_router: StartRouter, tmp_path: Path) -> None:
    path = str(tmp_path / "responses.db")
    one, other = await start_router(worker, response_file=path), await start_router(worker, response_file=path)
    first = await ask(one, "Where?")
    one.stop.set()
    await one.task
    await ask(other, "When?", first)
    assert turn("assistant", "Paris.") + turn("user", "When?") in prompt_of(worker)
    third = await start_router(worker, response_file=str(tmp_path / "other.db"))
    with pytest.raises(openai.BadRequestError, match="not kept here"):
        await ask(third, "When?", first)


async def test_a_stream_that_fails_is_told_and_not_continued(
    worker: FakeWorker, start_router: StartRouter, tmp_path: Path
) -> None:
    soon = DispatchLimits(recovery_wait_s=0.01)
    router = await start_router(worker, limits=soon, response_file=str(tmp_path / "responses.db"))
    worker.die_after = 2
    worker.spoil = lambda _: setattr(worker, "refuse", (grpc.StatusCode.INTERNAL, "it broke"))
    events = [event async for event in await ask(router, "x", stream=True)]
    failed: Any = events[-1]
    assert failed.type == "response.failed"
    assert (await router.openai.responses.retrieve(failed.response.id)).status == "failed"
    worker.refuse = worker.die_after = worker.spoil = None
    with pytest.raises(openai.BadRequestError, match="failed: continue the response before it"):
        await ask(router, "y", failed.response)


async def test_a_client_that_leaves_leaves_nothing(router: RunningRouter, worker: FakeWorker) -> None:
    worker.hang_after = 2
    before = sample("baton_router_stored_responses_total", event="stored")
    stream = await ask(router, "x", stream=True)
    async for event in stream:
        if event.type == "response.output_text.delta":
            break
    response_id = worker.requests[-1].request_id
    await stream.close()
    await asyncio.wait_for(worker.cancelled.wait(), 20)
    assert response_id
    assert sample("baton_router_stored_responses_total", event="stored") == before


async def test_a_file_that_fails_loses_no_answer(router: RunningRouter, monkeypatch: pytest.MonkeyPatch) -> None:
    first = await ask(router, "Where?")

    def fail(*_: object) -> None:
        raise sqlite3.OperationalError("disk is full")

    lost = sample("baton_router_stored_responses_total", event="lost")
    monkeypatch.setattr(ResponseStore, "add", fail)
    second = await ask(router, "When?", first)
    assert (second.output_text, second.store) == ("Paris.", False)
    events = [event async for event in await ask(router, "When?", first, stream=True)]
    assert events[-1].response.store is False
    assert sample("baton_router_stored_responses_total", event="lost") == lost + 2
    monkeypatch.setattr(ResponseStore, "earlier", fail)
    with pytest.raises(openai.InternalServerError) as refused:
        await ask(router, "Why?", first)
    assert refused.value.status_code == 503


async def test_a_slow_file_holds_up_nobody(
    worker: FakeWorker, start_router: StartRouter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process writes for long: those that use the file wait for a while, and others not at all."""
    path = str(tmp_path / "responses.db")
    monkeypatch.setattr(stored_responses, "WAIT_S", 1.0)
    router = await start_router(worker, response_file=path)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    lost = sample("baton_router_stored_responses_total", event="lost")
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        answers = [asyncio.create_task(ask(router, "Where?")) for _ in range(3)]
        told = [await asyncio.wait_for(one, 60) for one in answers]
        await asyncio.wait_for(asyncio.to_thread(int), 60)
        with pytest.raises(openai.InternalServerError) as refused:
            await ask(router, "When?", told[0])
        other.execute("ROLLBACK")
    assert [one.store for one in told] == [False] * 3
    assert refused.value.status_code == 503
    assert sample("baton_router_stored_responses_total", event="lost") == lost + 3
    assert (await ask(router, "Where?")).store is True
    with sqlite3.connect(path) as db:
        assert db.execute("SELECT COUNT(*) FROM responses").fetchone() == (1,), "one that was told as not stored"


async def test_a_file_that_is_no_store(tmp_path: Path) -> None:
    path = tmp_path / "other"
    path.write_text("something else, and more than a header's length of it" * 100)
    with pytest.raises(StartupError, match=r"^response_file: "):
        await serve(RouterSettings.model_validate({**SETTINGS, "decode": ("127.0.0.1:1",), "response_file": str(path)}))


@pytest.mark.parametrize("policy", ["session", "prefix_aware"])
async def test_each_turn_goes_where_the_first_one_is(
    start_worker: StartWorker, start_router: StartRouter, tmp_path: Path, policy: str
) -> None:
    workers = [await start_worker() for _ in range(3)]
    router = await start_router(*workers, policy=policy, response_file=str(tmp_path / "responses.db"))
    for number in range(6):
        for one in workers:
            one.requests.clear()
        text = f"{number}, and what is far longer than a block or two of them"
        last = await ask(router, text, **({"prompt_cache_key": "mine"} if number == 1 else {}))
        for _ in range(2):
            last = await ask(router, "And then?", last)
        [first] = [one for one in workers if one.requests]
        assert len(first.requests) == 3
        async with httpx.AsyncClient(base_url=router.url) as client:
            for one in workers:
                one.hints.clear()
            answer = await client.post("/v1/cache/prefetch", json={"previous_response_id": last.id})
        assert [one["address"] for one in answer.json()["workers"]] == [first.address]
        [hint] = first.hints
        assert hint.action == worker_pb2.CACHE_ACTION_PREFETCH


async def test_hints_about_a_conversation(router: RunningRouter, worker: FakeWorker) -> None:
    first = await ask(router, "Where is it? " * 9, instructions="Be brief", tools=[TOOL])
    async with httpx.AsyncClient(base_url=router.url) as client:
        path = "/v1/cache/retain"
        answer = await client.post(path, json={"previous_response_id": first.id, "seconds": 60})
        both = await client.post(path, json={"previous_response_id": first.id, "prompt": "x", "seconds": 60})
        none = await client.post(path, json={"previous_response_id": "resp_1", "seconds": 60})
    prompt = list(worker.requests[-1].prompt_token_ids)
    assert answer.json()["num_blocks"] >= len(prompt) // 16 > 9
    assert worker.hints[0].block_hashes.startswith(names(prompt))
    assert (both.status_code, both.json()["error"]["param"]) == (400, "messages")
    assert (none.status_code, none.json()["error"]["param"]) == (400, "previous_response_id")
