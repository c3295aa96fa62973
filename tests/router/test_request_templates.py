"""Requests that bring a chat template of their own, through every interface that takes one."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from typing import Any

import grpc
import httpx
import pytest

from protos.baton.v1 import inference_pb2
from tests.each_case import each_case
from tests.router import chat_templates
from tests.router.conftest import RunningRouter, StartRouter, StartWorker
from tests.router.test_grpc import violated_field
from tests.router.test_tools import prompt_of
from tests.router.test_vllm_fields import chunks, refused, whole
from tests.router.tiny_tokenizer import ids_of
from tests.router.tool_calls import TOOL, TWO_CALLS
from tests.support.fake_worker import ANSWER, FakeWorker
from text.template_process import MAX_CHARS, TemplateProcess

USER: dict[str, Any] = {"role": "user", "content": "Where?"}
OWN = "{{ bos_token }}{% for m in messages %}{{ m.role | upper }}: {{ m.content }}\n{% endfor %}{{ style }}>"
WRITTEN = "<|im_start|>USER: Where?\n>"
HI = inference_pb2.ChatMessage(role="user", content="Where?")


@pytest.fixture
async def worker(start_worker: StartWorker) -> FakeWorker:
    worker = await start_worker()
    worker.false_info = {"max_model_len": 4096}
    return worker


@pytest.fixture
async def trusting(worker: FakeWorker, start_router: StartRouter) -> RunningRouter:
    return await start_router(worker, trust_request_chat_template=True)


async def post(router: RunningRouter, path: str, body: dict[str, Any]) -> httpx.Response:
    async with httpx.AsyncClient(base_url=router.url) as client:
        return await client.post(path, json=body)


async def test_every_interface_takes_it(trusting: RunningRouter, worker: FakeWorker) -> None:
    asked: dict[str, Any] = {"messages": [USER], "chat_template": OWN}
    answer = await whole(trusting, "chat/completions", **asked, n=2)
    assert [one["message"]["content"] for one in answer["choices"]] == [ANSWER] * 2
    assert prompt_of(worker) == WRITTEN
    await chunks(trusting, "chat/completions", **asked, chat_template_kwargs={"style": "brief"})
    assert prompt_of(worker) == "<|im_start|>USER: Where?\nbrief>"
    await whole(trusting, "responses", input="Where?", chat_template=OWN)
    assert prompt_of(worker) == WRITTEN
    await whole(trusting, "messages", messages=[USER], max_tokens=9, chat_template=OWN)
    assert prompt_of(worker) == WRITTEN
    assert (await post(trusting, "/tokenize", asked)).json()["tokens"] == ids_of(WRITTEN)
    await whole(trusting, "embeddings", **asked)
    assert list(worker.embedded[-1].prompt_token_ids) == ids_of(WRITTEN)
    retained = await post(trusting, "/v1/cache/retain", {**asked, "seconds": 5})
    assert retained.json()["num_tokens"] <= len(ids_of(WRITTEN))
    chat = inference_pb2.ChatRequest(messages=[HI], chat_template=OWN, chat_template_kwargs='{"style": "brief"}')
    assert [one async for one in trusting.inference.Chat(chat)]
    assert prompt_of(worker) == "<|im_start|>USER: Where?\nbrief>"
    tokens = await trusting.inference.Tokenize(inference_pb2.TokenizeRequest(messages=[HI], chat_template=OWN))
    assert list(tokens.token_ids) == ids_of(WRITTEN)
    prefix = inference_pb2.Prefix(messages=[HI], chat_template=OWN)
    await trusting.inference.RetainPrefix(inference_pb2.RetainPrefixRequest(prefix=prefix, seconds=5))
    await whole(trusting, "chat/completions", messages=[USER], chat_template="")  # none
    assert prompt_of(worker) == "<|im_start|>user\nWhere?<|im_end|>\n<|im_start|>assistant\n"


async def test_control_tokens_are_the_templates_and_not_the_messages(
    trusting: RunningRouter, worker: FakeWorker
) -> None:
    said = {**USER, "content": "<|im_end|>"}
    await whole(trusting, "chat/completions", messages=[said], chat_template="{{ messages[0].content }}<|im_end|>")
    (end,) = ids_of("<|im_end|>")
    assert list(worker.requests[-1].prompt_token_ids).count(end) == 1
    assert prompt_of(worker) == "<|im_end|><|im_end|>"


async def test_answers_are_read_as_the_template_tells(trusting: RunningRouter, worker: FakeWorker) -> None:
    """The model's own knows no tools and no reasoning."""
    worker.answer = ids_of(TWO_CALLS)
    asked: dict[str, Any] = {"messages": [USER], "tools": [TOOL], "chat_template": chat_templates.HERMES}
    message = (await whole(trusting, "chat/completions", **asked))["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"], len(message["tool_calls"])) == ("Yes.", "hm", 2)
    assert '"name": "f"' in prompt_of(worker)
    generic = await whole(trusting, "chat/completions", **{**asked, "chat_template": OWN})
    assert len(generic["choices"][0]["message"]["tool_calls"]) == 2
    assert "You can call the functions" in prompt_of(worker)


async def test_the_last_message_goes_on(trusting: RunningRouter, worker: FakeWorker) -> None:
    begun = {"role": "assistant", "content": "I say"}
    await whole(trusting, "chat/completions", messages=[USER, begun], continue_final_message=True, chat_template=OWN)
    assert prompt_of(worker) == "<|im_start|>USER: Where?\nASSISTANT: I say"


async def test_a_model_without_a_template_can_be_chatted_with(
    start_worker: StartWorker, start_router: StartRouter
) -> None:
    worker = await start_worker()
    worker.chat_template = "{% if %}"
    router = await start_router(worker, trust_request_chat_template=True)
    assert (await refused(router, "chat/completions", messages=[USER]))["param"] == "messages"
    await whole(router, "chat/completions", messages=[USER], chat_template=OWN)
    assert prompt_of(worker) == WRITTEN


@each_case(
    ("given", "words"),
    [
        ("{% if %}", "cannot be compiled: "),
        ("{{ raise_exception('one question only') }}", "refuses the messages: one question only"),
        ("{{ ''.__class__.x }}", "unsafe"),
        ("{{ 'a' * 10**9 }}", "it costs more than 128 MiB to render"),
        ("a" * (MAX_CHARS + 1), f"must have at most {MAX_CHARS} characters"),
        ("{{ 'a' * 10**6 }}", "writes a prompt of 1000000 characters, more than"),
        ("{{ nothing }}", "must not be empty"),
        ("\ud800", "must be UTF-8"),
        (5, "has the wrong type"),
    ],
)
async def test_refused_by_its_name_and_the_next_is_served(
    trusting: RunningRouter, worker: FakeWorker, given: object, words: str
) -> None:
    content = json.dumps({"messages": [USER], "chat_template": given}).encode()
    headers = {"Content-Type": "application/json"}
    async with httpx.AsyncClient(base_url=trusting.url) as client:
        for path in ("/v1/chat/completions", "/tokenize"):
            answer = await client.post(path, content=content, headers=headers)
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["param"] == "chat_template"
            assert re.search(words, answer.json()["error"]["message"]), answer.text
    if isinstance(given, str) and given.isascii():
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(aiter(trusting.inference.Chat(inference_pb2.ChatRequest(messages=[HI], chat_template=given))))
        assert violated_field(caught.value) == "chat_template"
    await whole(trusting, "chat/completions", messages=[USER], chat_template=OWN)
    assert prompt_of(worker) == WRITTEN


async def test_other_fields_are_to_blame_for_what_is_theirs(trusting: RunningRouter) -> None:
    asked: dict[str, Any] = {"messages": [USER], "chat_template": OWN}
    for more, param in (
        ({"chat_template_kwargs": {"nothing": 1}}, "chat_template_kwargs.nothing"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"messages": [{**USER, "content": "word " * 40_000}]}, "messages"),
    ):
        assert (await refused(trusting, "chat/completions", **{**asked, **more}))["param"] == param


async def test_ten_megabytes(trusting: RunningRouter) -> None:
    answer = await post(trusting, "/v1/chat/completions", {"messages": [USER], "chat_template": "a" * 10**7})
    assert answer.status_code in (400, 413), answer.text


@each_case(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [USER]}),
        ("/v1/responses", {"input": "x"}),
        ("/v1/embeddings", {"messages": [USER]}),
        ("/tokenize", {"messages": [USER]}),
        ("/v1/cache/retain", {"messages": [USER], "seconds": 1}),
    ],
)
async def test_refused_where_it_is_not_allowed(router: RunningRouter, path: str, body: dict[str, Any]) -> None:
    answer = await post(router, path, {**body, "chat_template": "x"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "chat_template")
    assert "--trust-request-chat-template" in answer.json()["error"]["message"]


async def test_refused_over_grpc_where_it_is_not_allowed(router: RunningRouter) -> None:
    inference = router.inference
    prefix = inference_pb2.Prefix(messages=[HI], chat_template="x")
    for field, ask in (
        (
            "chat_template",
            lambda: anext(aiter(inference.Chat(inference_pb2.ChatRequest(messages=[HI], chat_template="x")))),
        ),
        ("chat_template", lambda: inference.Tokenize(inference_pb2.TokenizeRequest(messages=[HI], chat_template="x"))),
        ("chat_template", lambda: inference.Tokenize(inference_pb2.TokenizeRequest(text="x", chat_template="x"))),
        ("prefix.chat_template", lambda: inference.EvictPrefix(inference_pb2.EvictPrefixRequest(prefix=prefix))),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask()
        assert violated_field(caught.value) == field


async def test_others_are_served_while_one_is_rendered(
    trusting: RunningRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go = threading.Event(), threading.Event()
    ask = TemplateProcess.ask

    def held(self: TemplateProcess, *job: Any) -> dict[str, object]:
        begun.set()
        assert go.wait(60)
        return ask(self, *job)

    monkeypatch.setattr(TemplateProcess, "ask", held)
    slow = asyncio.create_task(whole(trusting, "chat/completions", messages=[USER], chat_template="slow"))
    async with asyncio.timeout(60):
        while not begun.is_set():  # noqa: ASYNC110 (set by a thread)
            await asyncio.sleep(0.002)
    await whole(trusting, "chat/completions", messages=[USER])
    await whole(trusting, "chat/completions", messages=[USER], guided_regex="a+")  # which another child checks
    assert not slow.done()
    go.set()
    await slow
