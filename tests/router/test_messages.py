"""`/v1/messages`, as Anthropic's clients ask. `tests/clients` has such a client."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from common.cache_hints import Retain
from common.errors import UnavailableError
from common.types import FinishReason
from router.api.rest.anthropic.messages import MessageAnswer
from router.api.rest.anthropic.messages_body import MessagesBody
from router.api.rest.openai.large_json import json_parts
from router.api.rest.openai.parsing import parse
from router.running.request import GenerationRequest, Output
from tests.each_case import each_case
from tests.router import chat_templates
from tests.router.conftest import RunningRouter, StartRouter, StartWorker
from tests.router.test_answer import REPORT, USAGE, FakeGeneration, requests
from tests.router.test_tools import form_of, prompt_of
from tests.router.tiny_tokenizer import ids_of
from tests.router.tool_calls import TWO_CALLS
from tests.support.fake_worker import ANSWER, FakeWorker
from text.answer_parts import Part, TextPart, ToolCallDelta

Json = dict[str, Any]
PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
ASK: Json = {"role": "user", "content": "Do"}
TOOL: Json = {
    "name": "f",
    "description": "Does it",
    "input_schema": {"type": "object", "properties": {"x": {"type": "integer"}}},
}
CALL: Json = {"type": "tool_use", "id": "c1", "name": "f", "input": {"x": 1}}
RESULT: Json = {"type": "tool_result", "tool_use_id": "c1", "content": "done"}
SCHEMA: Json = {"type": "object"}
EPHEMERAL: Json = {"type": "ephemeral"}
IMAGE: Json = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}


@pytest.fixture
async def worker(start_worker: StartWorker) -> FakeWorker:
    worker = await start_worker()
    worker.chat_template = chat_templates.HERMES
    worker.answer = ids_of("Paris.")
    worker.false_info = {"max_model_len": 4096}
    return worker


@pytest.fixture
async def http(router: RunningRouter) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=router.url, timeout=60) as client:
        yield client


async def post(http: httpx.AsyncClient, body: Json, path: str = PATH, **headers: str) -> httpx.Response:
    known = {"max_tokens": 200, "messages": [ASK]} if path == PATH else {"messages": [ASK]}
    return await http.post(path, json={**known, **body}, headers=headers)


async def asked(http: httpx.AsyncClient, **body: Any) -> Json:
    answer = await post(http, body)
    assert answer.status_code == 200, answer.text
    whole: Json = answer.json()
    return whole


async def events_of(http: httpx.AsyncClient, **body: Any) -> list[Json]:
    answer = await post(http, {**body, "stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = []
    for event in answer.text.strip().split("\n\n"):
        name, data = event.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def put_together(events: list[Json]) -> Json:
    """The message that a stream tells, and whether its blocks come one after the other."""
    message: Json = {}
    open_index: int | None = None
    texts: list[str] = []
    for event in events:
        kind = event["type"]
        if kind == "message_start":
            message = deepcopy(event["message"])
        elif kind == "content_block_start":
            assert open_index is None
            open_index = event["index"]
            assert open_index == len(message["content"])
            message["content"].append(deepcopy(event["content_block"]))
            texts = []
        elif kind == "content_block_delta":
            assert open_index == event["index"]
            delta, block = event["delta"], message["content"][-1]
            if delta["type"] == "input_json_delta":
                texts.append(delta["partial_json"])
            else:
                name = delta["type"].removesuffix("_delta")
                block[name] += delta[name]
        elif kind == "content_block_stop":
            assert open_index == event["index"]
            open_index = None
            if message["content"][-1]["type"] == "tool_use":
                message["content"][-1]["input"] = json.loads("".join(texts) or "{}")
        elif kind == "message_delta":
            message |= event["delta"]
            message["usage"] |= event["usage"]
            message["baton"] = event["baton"]
    assert open_index is None
    assert [event["type"] for event in events].count("message_stop") == 1
    assert events[-1]["type"] == "message_stop"
    return message


def comparable(message: Json) -> Json:
    """Without what differs from one answer to the next."""
    blocks = [{name: value for name, value in block.items() if name != "id"} for block in message["content"]]
    return {"content": blocks, **{name: message[name] for name in ("model", "role", "type", "stop_reason", "usage")}}


async def test_text(http: httpx.AsyncClient, worker: FakeWorker) -> None:
    answer = await post(http, {"model": "tiny", "system": "Be brief", "temperature": 0}, **{"x-request-id": "mine"})
    message = answer.json()
    assert message["content"] == [{"type": "text", "text": "Paris."}]
    assert (message["id"], message["type"], message["role"], message["model"]) == (
        "msg_mine",
        "message",
        "assistant",
        "tiny",
    )
    assert (message["stop_reason"], message["stop_sequence"]) == ("end_turn", None)
    assert prompt_of(worker).startswith("<|im_start|>system\nBe brief<|im_end|>\n<|im_start|>user\nDo<|im_end|>\n")
    prompt = len(worker.requests[0].prompt_token_ids)
    assert message["usage"] == {
        "input_tokens": prompt - 3,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 3,
        "output_tokens": len(worker.answer) + 1,
    }
    assert answer.headers["request-id"] == answer.headers["x-request-id"] == message["baton"]["request_id"] == "mine"


@each_case("answer", ["Paris.", TWO_CALLS, "<think>hm</think>naïve 東京 😀"])
async def test_a_stream_tells_the_whole_message(http: httpx.AsyncClient, worker: FakeWorker, answer: str) -> None:
    worker.answer = ids_of(answer)
    whole = await asked(http, tools=[TOOL])
    events = await events_of(http, tools=[TOOL])
    assert comparable(put_together(events)) == comparable(whole)
    assert events[0]["message"]["stop_reason"] is None
    assert events[0]["message"]["usage"]["input_tokens"] == len(worker.requests[0].prompt_token_ids)


async def test_calls_and_thinking(http: httpx.AsyncClient, worker: FakeWorker) -> None:
    worker.answer = ids_of(TWO_CALLS)
    message = await asked(http, tools=[TOOL])
    assert [block["type"] for block in message["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    thinking, text, *calls = message["content"]
    assert (thinking["thinking"], text["text"]) == ("hm", "Yes.")
    assert [(call["name"], call["input"]) for call in calls] == [("f", {"x": 1}), ("f", {"x": 2})]
    assert message["stop_reason"] == "tool_use"
    assert message["usage"]["output_tokens_details"]["thinking_tokens"] > 0
    # What was answered can be sent back, with results.
    first, second = ({**RESULT, "tool_use_id": call["id"]} for call in calls)
    second |= {"content": [{"type": "text", "text": "no"}], "is_error": True}
    results = {"role": "user", "content": [first, second, {"type": "text", "text": "And?"}]}
    again = [ASK, {"role": "assistant", "content": message["content"]}, results]
    await asked(http, messages=again, tools=[TOOL], max_tokens=3)
    prompt, call = prompt_of(worker), '<tool_call>\n{"name": "f", "arguments": {"x": %d}}\n</tool_call>'
    assert f"<|im_start|>assistant\n<think>hm</think>Yes.{call % 1}{call % 2}<|im_end|>" in prompt
    assert prompt.endswith(
        "<|im_start|>tool\ndone<|im_end|>\n<|im_start|>tool\nError: no<|im_end|>\n"
        "<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_calls_are_streamed_as_they_come(http: httpx.AsyncClient, worker: FakeWorker) -> None:
    worker.answer = ids_of(TWO_CALLS)
    worker.hang_after = len(ids_of(TWO_CALLS[: TWO_CALLS.index("1}")]))
    body = {"max_tokens": 200, "messages": [ASK], "tools": [TOOL], "stream": True}
    pieces = []
    async with http.stream("POST", PATH, json=body) as answer:
        async for line in answer.aiter_lines():
            if "input_json_delta" in line:
                pieces.append(json.loads(line.removeprefix("data: "))["delta"]["partial_json"])
                worker.hang_after = None  # a call is shown while it is being written
    assert "".join(pieces) == '{"x": 1}{"x": 2}'
    assert pieces[0] != '{"x": 1}'


async def test_blocks_have_the_order_of_the_text_that_comes_at_once() -> None:
    """A speculating worker may send what is before, in and after a call in one event."""
    parts: list[Part] = [TextPart("hm", is_reasoning=True), ToolCallDelta(0, "c1", "f", "{}"), TextPart("and so"),
             ToolCallDelta(1, "c2", "g", '{"x'), TextPart("")]  # fmt: skip
    output = Output(
        text="and so",
        tokens=[],
        parts=parts,
        finish_reason=FinishReason.LENGTH,
        is_cut=True,
        report=REPORT,
        usage=USAGE,
    )
    held: list[int] = []
    answer = MessageAnswer(FakeGeneration([output]), requests(1)[0], "r", hold=held.append)  # type: ignore[arg-type]
    message = json.loads(b"".join(json_parts(await answer.whole())))
    assert [block["type"] for block in message["content"]] == ["thinking", "tool_use", "text", "tool_use"]
    # A call that was cut off has its text where an object has to be.
    assert [block["input"] for block in message["content"] if block["type"] == "tool_use"] == [{}, {"arguments": '{"x'}]
    assert message["stop_reason"] == "max_tokens"
    assert len(held) == 4, "each piece that is kept counts"


@pytest.mark.parametrize(
    ("written", "given"),
    [
        ("", "{}"),
        ('{"x": 1}', '{"x": 1}'),
        ('{"x": 123456789012345678901234567890}', '{"x": 123456789012345678901234567890}'),
        ('{"x": NaN}', None),
        ('{"x": "\\ud800"}', None),
        ("[1]", None),
        ("[" * 100_000, None),
    ],
)
async def test_arguments_are_as_the_model_wrote_them(written: str, given: str | None) -> None:
    """`given` None: they are the text that they are."""
    output = Output(
        text="",
        tokens=[],
        parts=[ToolCallDelta(0, "c", "f", written)],
        finish_reason=FinishReason.TOOL_CALLS,
        report=REPORT,
        usage=USAGE,
    )
    answer = MessageAnswer(FakeGeneration([output]), requests(1)[0], "r", hold=lambda _: None)  # type: ignore[arg-type]
    whole = b"".join(json_parts(await answer.whole())).decode()
    assert f'"input":{given or json.dumps({"arguments": written}, separators=(",", ":"))}' in whole


async def test_why_an_answer_ended(http: httpx.AsyncClient, worker: FakeWorker) -> None:
    worker.answer = ids_of(ANSWER)
    stopped = await asked(http, stop_sequences=["Paris", "zz"])
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "Paris")
    assert stopped["content"] == [{"type": "text", "text": "The capital of France is "}]
    assert (await asked(http, max_tokens=2))["stop_reason"] == "max_tokens"
    assert list(worker.requests[0].sampling_params.stop) == ["Paris", "zz"]
    worker.answer = []
    empty = await asked(http)
    assert (empty["content"], empty["stop_reason"]) == ([], "end_turn")
    assert put_together(await events_of(http))["content"] == []


async def test_thinking_that_is_not_shown_can_be_sent_back(http: httpx.AsyncClient, worker: FakeWorker) -> None:
    worker.answer = ids_of("<think>hm</think>Yes.")
    omitted = {"type": "adaptive", "display": "omitted"}
    message = await asked(http, thinking=omitted)
    block = message["content"][0]
    assert (block["type"], block["thinking"]) == ("thinking", "")
    assert comparable(put_together(await events_of(http, thinking=omitted))) == comparable(message)
    await asked(http, messages=[ASK, {"role": "assistant", "content": message["content"]}, ASK])
    assert "<think>hm</think>Yes.<|im_end|>" in prompt_of(worker)
    # What other services signed is taken with its text, and not without.
    foreign = {"type": "thinking", "thinking": "so", "signature": "EqQBCg"}
    await asked(http, messages=[ASK, {"role": "assistant", "content": [foreign]}, ASK])
    assert "<think>so</think>" in prompt_of(worker)


@each_case(
    ("given", "end"),
    [
        ({}, "assistant\n"),
        ({"thinking": {"type": "adaptive"}}, "assistant\n"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 1025}, "assistant\n"),
        ({"thinking": {"type": "disabled"}}, "assistant\n<think>\n\n</think>\n\n"),
        ({"output_config": {"effort": "high"}}, "assistant\n"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "assistant\n<think>\n\n</think>\n\n"),
    ],
)
async def test_how_much_to_think(http: httpx.AsyncClient, worker: FakeWorker, given: Json, end: str) -> None:
    await asked(http, **given)
    assert prompt_of(worker).endswith(end)


async def test_neighbours_of_one_role_are_one_turn(http: httpx.AsyncClient, worker: FakeWorker) -> None:
    blocks = [{"type": "text", "text": "b", "citations": None}, {"type": "text", "text": "c"}]
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": blocks}]
    messages += [{"role": "system", "content": "s"}, ASK]
    await asked(http, messages=messages, system=[{"type": "text", "text": "x"}, {"type": "text", "text": "y"}])
    turns = ["system\nx\ny", "user\na\nb\nc", "system\ns", "user\nDo"]
    written = "".join(f"<|im_start|>{turn}<|im_end|>\n" for turn in turns)
    assert prompt_of(worker) == f"{written}<|im_start|>assistant\n"


async def test_the_answer_continues_the_assistants_last_message(http: httpx.AsyncClient, worker: FakeWorker) -> None:
    message = await asked(http, messages=[ASK, {"role": "assistant", "content": "The best is ("}])
    assert prompt_of(worker).endswith("<|im_start|>assistant\nThe best is (")
    assert message["content"] == [{"type": "text", "text": "Paris."}]


async def test_tools_and_forms(http: httpx.AsyncClient, worker: FakeWorker) -> None:
    """All that needs a grammar, whose process takes long to start."""
    tools = [TOOL, {"type": "custom", "name": "g", "input_schema": SCHEMA}]
    worker.answer = ids_of('[{"name": "g", "parameters": {}}]')
    message = await asked(http, tools=tools, tool_choice={"type": "any"}, thinking={"type": "disabled"})
    assert (message["content"][0]["name"], message["stop_reason"]) == ("g", "tool_use")
    worker.answer = ids_of("{}")
    named = {"type": "tool", "name": "g", "disable_parallel_tool_use": True}
    message = await asked(http, tools=tools, tool_choice=named, thinking={"type": "disabled"})
    assert [(block["name"], block["input"]) for block in message["content"]] == [("g", {})]
    assert message["stop_reason"] == "tool_use"
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    await asked(http, output_config={"format": {"type": "json_schema", "schema": schema}})
    assert form_of(worker)["json_schema"] == schema
    wrong = {"type": "object", "$ref": "#/x"}
    await refused(http, {"output_config": {"format": {"type": "json_schema", "schema": wrong}}}, "output_config.format")
    forced = {"tools": [{**TOOL, "input_schema": wrong}], "tool_choice": {"type": "any"}}
    await refused(http, forced, "tools[0].input_schema")


async def test_which_tools_the_model_may_call(http: httpx.AsyncClient, worker: FakeWorker) -> None:
    worker.answer = ids_of(TWO_CALLS)
    one = await asked(http, tools=[TOOL], tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [block["type"] for block in one["content"]].count("tool_use") == 1
    none = await asked(http, tools=[TOOL], tool_choice={"type": "none"})
    assert "Does it" not in prompt_of(worker)
    assert none["stop_reason"] == "end_turn"


async def test_how_long_a_prompt_is(http: httpx.AsyncClient, worker: FakeWorker) -> None:
    given: Json = {
        "system": "Be brief",
        "tools": [TOOL],
        "messages": [ASK, {"role": "assistant", "content": [CALL]}, {"role": "user", "content": [RESULT]}],
        "thinking": {"type": "disabled"},
    }
    counted = await post(http, given, COUNT, **{"x-request-id": "mine"})
    assert counted.headers["request-id"] == "mine"
    assert not worker.requests
    usage = (await asked(http, **given))["usage"]
    assert counted.json() == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}


@each_case(
    ("given", "seconds"),
    [
        ({}, 0),
        ({"cache_control": EPHEMERAL}, 300),
        ({"system": [{"type": "text", "text": "s", "cache_control": {**EPHEMERAL, "ttl": "1h"}}]}, 3600),
        ({"tools": [{**TOOL, "cache_control": {**EPHEMERAL, "ttl": "5m"}}]}, 300),
        (
            {
                "messages": [{"role": "user", "content": [{"type": "text", "text": "s", "cache_control": EPHEMERAL}]}],
                "retain": {"seconds": 7},
            },
            7,
        ),
    ],
)
async def test_a_prompt_that_is_kept(http: httpx.AsyncClient, worker: FakeWorker, given: Json, seconds: float) -> None:
    await asked(http, **given)
    assert worker.requests[0].retain.seconds == seconds


def test_a_prompt_is_kept_no_longer_than_the_router_allows() -> None:
    body = {"max_tokens": 1, "messages": [ASK], "cache_control": {**EPHEMERAL, "ttl": "1h"}}
    read = parse(MessagesBody, json.dumps(body).encode())
    assert [read.retained(most_s) for most_s in (60.0, 1e6, 0.0)] == [Retain(60.0), Retain(3600.0), None]


async def test_a_user_is_a_session(start_worker: StartWorker, start_router: StartRouter) -> None:
    workers = [await start_worker() for _ in range(3)]
    router = await start_router(*workers, policy="session")
    async with httpx.AsyncClient(base_url=router.url) as http:
        for _ in range(4):
            await asked(http, metadata={"user_id": "s1"})
    assert sorted(len(worker.requests) for worker in workers) == [0, 0, 4]


async def test_what_changes_nothing(http: httpx.AsyncClient, worker: FakeWorker) -> None:
    """docs/api.md has the list."""
    citation = {"type": "char_location", "cited_text": "x"}
    said = {"role": "assistant", "content": [{"type": "text", "text": "Yes", "citations": [citation]}]}
    call = {"role": "assistant", "content": [{**CALL, "caller": {"type": "direct"}}]}
    tool = {**TOOL, "eager_input_streaming": True, "allowed_callers": ["direct"], "input_examples": []}
    await asked(
        http,
        messages=[ASK, said, ASK, call, {"role": "user", "content": [RESULT]}],
        tools=[tool],
        service_tier="standard_only",
        speed="standard",
        container=None,
        inference_geo=None,
    )
    plain = [ASK, {"role": "assistant", "content": "Yes"}, ASK, {"role": "assistant", "content": [CALL]}]
    await asked(http, messages=[*plain, {"role": "user", "content": [RESULT]}], tools=[TOOL])
    first, second = worker.requests
    assert first.prompt_token_ids == second.prompt_token_ids
    assert first.sampling_params.max_tokens == second.sampling_params.max_tokens


def user(*blocks: Json) -> Json:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


def assistant(*blocks: Json) -> Json:
    return {"messages": [ASK, {"role": "assistant", "content": list(blocks)}, ASK]}


def inside(**result: Any) -> Json:
    return {"messages": [*assistant(CALL)["messages"][:2], *user({**RESULT, **result})["messages"]]}


OF_PROMPT: list[tuple[Json, str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "Do"}, "messages"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    (user(), "messages[0].content"),
    (user({"type": "text"}), "messages[0].content[0].text"),
    (user({"type": "text", "text": "x", "id": "y"}), "messages[0].content[0].id"),
    (user({"type": "text", "text": "x", "colour": 1}), "messages[0].content[0].colour"),
    (user({"type": "text", "text": "x", "citations": "none"}), "messages[0].content[0].citations"),
    (user({"type": "text", "text": "x", "citations": [{}]}), "messages[0].content[0].citations"),
    (user(IMAGE), "messages[0].content[0].type"),
    (user({"type": "text", "text": "x", "source": {}}), "messages[0].content[0].source"),
    (user({"type": "document", "source": {"type": "text"}, "title": "t"}), "messages[0].content[0].type"),
    (user({"type": "text", "text": "x"}, CALL), "messages[0].content[1].type"),
    (user({"type": "thinking", "thinking": "x", "signature": ""}), "messages[0].content[0].type"),
    (assistant(RESULT), "messages[1].content[0].type"),
    (assistant({"type": "redacted_thinking", "data": "x"}), "messages[1].content[0].type"),
    (assistant({"type": "thinking", "signature": ""}), "messages[1].content[0].thinking"),
    (assistant({"type": "thinking", "thinking": "", "signature": "EqQ"}), "messages[1].content[0].signature"),
    (assistant({**CALL, "id": ""}), "messages[1].content[0].id"),
    (assistant({**CALL, "name": "a b"}), "messages[1].content[0].name"),
    (assistant(*[CALL] * 129), "messages[1]"),
    (assistant({**CALL, "input": [1]}), "messages[1].content[0].input"),
    (assistant({**CALL, "input": {"x": [0] * 20_000}}), "messages[1].content[0].input"),
    (assistant({**CALL, "caller": {"type": "code_execution"}}), "messages[1].content[0].caller"),
    ({"messages": [ASK, {"role": "assistant", "content": [CALL]}]}, "messages[1]"),
    (inside(tool_use_id=""), "messages[2].content[0].tool_use_id"),
    (inside(content=[IMAGE]), "messages[2].content[0].content[0].type"),
    (inside(content=[{"type": "text"}]), "messages[2].content[0].content[0].text"),
    (inside(cache_control={"type": "eternal"}), "messages[2].content[0].cache_control.type"),
    (user(*[{"type": "text", "text": "x"}] * 5000), "messages"),
    ({"messages": [{"role": "user", "content": "word " * 8000}]}, "messages"),
    ({"system": [{"type": "image", "source": {}}]}, "system[0].type"),
    ({"system": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral", "ttl": "1d"}}]},
     "system[0].cache_control.ttl"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 5}]}, "tools[0].type"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
    ({"tools": [{"name": "f", "input_schema": {"type": "array"}}]}, "tools[0].input_schema"),
    ({"tools": [{**TOOL, "name": "a b"}]}, "tools[0].name"),
    ({"tools": [TOOL, TOOL]}, "tools[1].name"),
    ({"tools": [{**TOOL, "defer_loading": True}]}, "tools[0].defer_loading"),
    ({"tools": [{**TOOL, "eager_input_streaming": False}]}, "tools[0].eager_input_streaming"),
    ({"tools": [{**TOOL, "input_examples": [{}]}]}, "tools[0].input_examples"),
    ({"tools": [{**TOOL, "allowed_callers": ["code_execution_20250825"]}]}, "tools[0].allowed_callers"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "required"}}, "tool_choice.type"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "auto", "name": "f"}}, "tool_choice.name"),
    ({"tools": [TOOL], "tool_choice": {"type": "none", "disable_parallel_tool_use": True}},
     "tool_choice.disable_parallel_tool_use"),
    ({"tools": [TOOL], "tool_choice": "auto"}, "tool_choice"),
    ({"thinking": {"type": "always"}}, "thinking.type"),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "enabled", "budget_tokens": 1023}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "adaptive", "budget_tokens": 1024}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "adaptive", "display": "some"}}, "thinking.display"),
    ({"thinking": {"type": "disabled", "display": "omitted"}}, "thinking.display"),
    ({"thinking": {"type": "disabled"}, "output_config": {"effort": "low"}}, "output_config.effort"),
    ({"output_config": {"effort": "none"}}, "output_config.effort"),
    ({"speed": "fast"}, "speed"),
    ({"cache_control": {"type": "ephemeral", "ttl": "2h"}}, "cache_control.ttl"),
    ({"chat_template": "x"}, "chat_template"),
    ({"chat_template_kwargs": {"colour": 1}}, "chat_template_kwargs.colour"),
    ({"colour": 1}, "colour"),
]  # fmt: skip
OF_ANSWER: list[tuple[Json, str]] = [
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 5000}, "max_tokens"),
    ({"max_completion_tokens": 5}, "max_completion_tokens"),
    ({"stop": "x"}, "stop"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
    ({"logprobs": 1}, "logprobs"),
    ({"prompt_logprobs": 1}, "prompt_logprobs"),
    ({"guided": {"choice": ["a"]}}, "guided"),
    ({"temperature": -1}, "temperature"),
    ({"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 1024}, "thinking.budget_tokens"),
    ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    ({"metadata": {"user": "x"}}, "metadata.user"),
    ({"service_tier": "priority"}, "service_tier"),
    ({"container": "c"}, "container"),
    ({"context_management": {"edits": [1]}}, "context_management"),
    ({"diagnostics": {"previous_message_id": "m"}}, "diagnostics"),
    ({"inference_geo": "eu"}, "inference_geo"),
    ({"mcp_servers": [{}]}, "mcp_servers"),
    ({"retain": {"seconds": 1e9}}, "retain.seconds"),
    ({"slo": {"ttft_ms": -1}}, "slo.ttft_ms"),
    ({"request_id": ""}, "request_id"),
]  # fmt: skip


async def refused(http: httpx.AsyncClient, body: Json, field: str, path: str = PATH) -> None:
    answer = await post(http, body, path)
    assert answer.status_code == 400, answer.text
    error = answer.json()
    assert set(error) == {"type", "error", "request_id"}
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    assert error["error"]["message"].startswith(f"{field}: "), answer.text
    assert answer.headers["request-id"] == answer.headers["x-request-id"] == error["request_id"]


@each_case(("body", "field"), [*OF_PROMPT, *OF_ANSWER])
async def test_what_is_refused(http: httpx.AsyncClient, worker: FakeWorker, body: Json, field: str) -> None:
    await refused(http, body, field)
    assert not worker.requests


@pytest.mark.slow
@each_case(("body", "field"), OF_PROMPT)
async def test_what_is_refused_is_not_counted_either(http: httpx.AsyncClient, body: Json, field: str) -> None:
    await refused(http, body, field, COUNT)


async def test_an_image_of_any_size_is_refused_by_its_name(http: httpx.AsyncClient) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "A" * 100_000}
    for large in ({"type": "image", "source": source}, {"type": "document", "title": "t", "source": source}):
        await refused(http, user({"type": "text", "text": "What?"}, large), "messages[0].content[1].type")


async def test_each_error_has_the_shape_and_an_id(http: httpx.AsyncClient, worker: FakeWorker) -> None:
    """Whoever refuses, and the client's own id if it gave one."""
    named, right = {"x-request-id": "mine", "anthropic-version": "2023-06-01"}, {"max_tokens": 3, "messages": [ASK]}
    assert (await http.post(PATH, json=right, headers=named)).status_code == 200
    unknown, text = {**named, "anthropic-version": "2020-01-01"}, {**named, "content-type": "text/plain"}
    invalid = "invalid_request_error"
    for answer, status, kind in (
        (await http.post(PATH, json={"model": "x", **right}, headers=named), 404, "not_found_error"),
        (await http.post(PATH, content=b"{", headers=named), 400, invalid),
        (await http.post(PATH, json=right, headers=unknown), 400, invalid),
        (await http.post(COUNT, json={"messages": [ASK]}, headers=unknown), 400, invalid),
        (await http.post(PATH, content=b"x", headers=text), 415, invalid),
    ):
        assert (answer.status_code, answer.json()["error"]["type"]) == (status, kind), answer.text
        assert answer.json()["request_id"] == answer.headers["request-id"] == "mine"
    newer = {**named, "anthropic-version": "2026-10-21"}
    assert (await http.post(PATH, json={**right, "temperature": 0}, headers=newer)).status_code == 200
    assert "anthropic-version: " in (await http.post(PATH, json=right, headers=unknown)).text
    for path, status in ((PATH, 405), (f"{PATH}/nothing", 404)):
        answer = await http.get(path)
        assert (answer.status_code, answer.json()["type"]) == (status, "error")
        assert answer.json()["request_id"] == answer.headers["request-id"]
    worker.refuse = (grpc.StatusCode.RESOURCE_EXHAUSTED, "queue is full")
    full = await post(http, {"stream": True})
    assert (full.status_code, full.json()["error"]["type"]) == (429, "rate_limit_error")
    assert full.headers["retry-after"] == "1"


async def test_an_error_after_the_first_token_is_an_event() -> None:
    class Failing(FakeGeneration):
        async def generate(
            self, request: GenerationRequest, index: int = 0
        ) -> AsyncGenerator[tuple[int, Output], None]:
            yield index, Output(text="Par", tokens=[])
            raise UnavailableError("it broke")

    answer = MessageAnswer(Failing(), requests(1)[0], "mine", hold=lambda _: None)  # type: ignore[arg-type]
    told = [event.decode() async for event in answer.events(contextlib.nullcontext())]
    names = [event.partition("\n")[0].removeprefix("event: ") for event in told]
    assert names == ["message_start", "content_block_start", "content_block_delta", "error"]
    assert json.loads(told[-1].partition("data: ")[2]) == {
        "type": "error",
        "error": {"type": "overloaded_error", "message": "it broke"},
        "request_id": "mine",
    }
    assert answer.failure is not None


async def test_keys(worker: FakeWorker, start_router: StartRouter, tmp_path: Path) -> None:
    """In the header of Anthropic's clients, or as at all other paths."""
    key = "k" * 32
    (tmp_path / "keys").write_text(f"{key} name=alice tenant=research")
    router = await start_router(worker, api_keys_file=str(tmp_path / "keys"))
    async with httpx.AsyncClient(base_url=router.url) as http:
        for given in ({"x-api-key": key}, {"authorization": f"Bearer {key}"}):
            assert (await post(http, {}, **given)).status_code == 200
        assert [request.cache_salt for request in worker.requests] == ['["research", ""]'] * 2
        both = {"authorization": "Bearer x", "x-api-key": key}
        for given in ({}, {"x-api-key": "x"}, {"x-api-key": ""}, both):
            answer = await post(http, {}, **given)
            assert (answer.status_code, answer.json()["error"]["type"]) == (401, "authentication_error")
            assert answer.json()["request_id"] == answer.headers["request-id"]
        assert (await http.get("/v1/models", headers={"x-api-key": key})).status_code == 200
