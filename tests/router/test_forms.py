"""Reasoning, calls of tools and a form in one request: what a worker is asked for, and what clients get of it."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from common.guided import Guided
from protos.baton.v1 import inference_pb2, types_pb2
from tests.each_case import each_case
from tests.router import chat_templates
from tests.router.conftest import RunningRouter, StartRouter, StartWorker
from tests.router.test_every_parameter import in_the_engine
from tests.router.tiny_tokenizer import ids_of
from tests.router.tool_calls import ASK, TOOL, worker
from tests.support.fake_worker import FakeWorker

__all__ = ["worker"]

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
TEXT_FORMAT: Any = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}
OPTIONAL_THOUGHT = {"type": "mark", "value": "<think>"}
JSON = '<think>\nhm {\n</think>\n\n{"a": 1}'
CALL = '<think>hm</think>\n\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
QUOTE = '<think></think>{"a": "<tool_call> </think>"}'


def format_of(worker: FakeWorker) -> Any:
    """What is asked of the worker after the reasoning, which the model may leave out."""
    first, answer = json.loads(worker.requests[-1].sampling_params.guided.structural_tag)["format"]["elements"]
    assert first["content"]["elements"][0] == OPTIONAL_THOUGHT
    return answer


async def chat(router: RunningRouter, *, stream: bool, **fields: Any) -> tuple[str, str, list[tuple[str, str]], str]:
    """(reasoning, content, calls, finish_reason) of a chat, streamed or whole."""
    body = {"messages": ASK, "stream": stream, "max_tokens": 200, **fields}
    async with httpx.AsyncClient(base_url=router.url) as client:
        answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    if stream:
        chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        choices, name = [chunk["choices"][0] for chunk in chunks if chunk["choices"]], "delta"
    else:
        choices, name = answer.json()["choices"], "message"
    calls: dict[int, tuple[str, str]] = {}
    for choice in choices:
        for index, call in enumerate(choice[name].get("tool_calls") or ()):
            known, arguments = calls.get(call.get("index", index), ("", ""))
            function = call["function"]
            calls[call.get("index", index)] = (known + function.get("name", ""), arguments + function["arguments"])
    texts = {part: "".join(c[name].get(part) or "" for c in choices) for part in ("reasoning_content", "content")}
    return texts["reasoning_content"], texts["content"], list(calls.values()), choices[-1]["finish_reason"]


@each_case(
    ("answer", "wanted"),
    [
        (JSON, ("hm {", '{"a": 1}', [], "stop")),
        (CALL, ("hm", "", [("f", '{"x": 1}')], "tool_calls")),
        (QUOTE, ("", '{"a": "<tool_call> </think>"}', [], "stop")),
        ('{"a": 1}', ("", '{"a": 1}', [], "stop")),
    ],
)
async def test_a_call_or_an_answer_of_the_form(
    router: RunningRouter, worker: FakeWorker, answer: str, wanted: object
) -> None:
    worker.answer = ids_of(answer)
    for stream in (False, True):
        assert await chat(router, stream=stream, tools=[TOOL], response_format=FORMAT) == wanted
        calls, form = format_of(worker)["elements"]
        assert form == {"type": "json_schema", "json_schema": SCHEMA}
        assert '"f"' in json.dumps(calls).replace("\\", "")


@each_case(
    "fields",
    [
        {"response_format": {"type": "json_object"}},
        {"guided_json": SCHEMA},
        {"guided_regex": "[a-z]+"},
        {"guided_choice": ["yes", "no"]},
        {"guided_grammar": 'root ::= "a"'},
        {"structured_outputs": {"regex": "a"}},
        {"guided": {"json_schema": SCHEMA}},
        {"guided": {"structural_tag": {"format": {"type": "const_string", "value": "x"}}}},
    ],
)
async def test_every_form_beside_tools(router: RunningRouter, worker: FakeWorker, fields: dict[str, Any]) -> None:
    worker.answer = ids_of(CALL)
    assert (await chat(router, stream=False, tools=[TOOL], **fields))[2] == [("f", '{"x": 1}')]
    assert format_of(worker)["type"] == "or"
    await chat(router, stream=False, tools=[TOOL], tool_choice="none", **fields)
    assert format_of(worker)["type"] != "or" or "guided_choice" in fields
    assert "tool_call" not in json.dumps(format_of(worker))


async def test_a_forced_call_takes_no_notice_of_the_form(router: RunningRouter, worker: FakeWorker) -> None:
    named: Any = {"type": "function", "function": {"name": "f"}}
    for choice, text, end in (
        (named, '{"x": 1}', "stop"),
        ("required", '[{"name": "f", "parameters": {"x": 1}}]', "tool_calls"),
    ):
        worker.answer = ids_of("<think>a call</think>\n\n" + text)
        for stream in (False, True):
            for form in ({}, {"response_format": FORMAT}, {"guided_regex": "a"}):
                answer = await chat(router, stream=stream, tools=[TOOL], tool_choice=choice, **form)
                assert answer == ("a call", "", [("f", '{"x": 1}')], end)
                assert '"a"' not in json.dumps(format_of(worker))


async def test_responses(router: RunningRouter, worker: FakeWorker) -> None:
    for answer, kinds in ((JSON, ["reasoning", "message"]), (CALL, ["reasoning", "function_call"])):
        worker.answer = ids_of(answer)
        for tools in ([{"type": "function", **TOOL["function"]}], []):
            asked: Any = {"model": "tiny", "input": "Do", "tools": tools, "text": TEXT_FORMAT}
            response = await router.openai.responses.create(**asked)
            if tools:
                assert [item.type for item in response.output] == kinds
            assert format_of(worker)["type"] == ("or" if tools else "json_schema")
            async with router.openai.responses.stream(**asked) as stream:
                events = [event async for event in stream]
            assert [item.type for item in events[-1].response.output] == [item.type for item in response.output]  # type: ignore[union-attr]
    forced: Any = {"tools": [{"type": "function", **TOOL["function"]}], "tool_choice": "required", "text": TEXT_FORMAT}
    worker.answer = ids_of('[{"name": "f", "parameters": {"x": 1}}]')
    response = await router.openai.responses.create(model="tiny", input="Do", **forced)
    assert [item.type for item in response.output] == ["function_call"]


async def test_over_grpc(router: RunningRouter, worker: FakeWorker) -> None:
    function = TOOL["function"]
    wanted: tuple[str, str, str]
    for answer, wanted in ((JSON, ("hm {", '{"a": 1}', "")), (CALL, ("hm", "", '{"x": 1}'))):
        worker.answer = ids_of(answer)
        request = inference_pb2.ChatRequest(
            messages=[inference_pb2.ChatMessage(role="user", content="Do")],
            tools=[inference_pb2.Tool(name="f", parameters=json.dumps(function["parameters"]))],
            sampling_params=types_pb2.SamplingParams(
                max_tokens=200, guided=types_pb2.Guided(json_schema=json.dumps(SCHEMA))
            ),
        )
        responses = [response async for response in router.inference.Chat(request)]
        parts = ["".join(response.reasoning for response in responses), "".join(one.text for one in responses)]
        calls = [call for response in responses for call in response.tool_calls]
        assert (*parts, "".join(call.arguments for call in calls)) == wanted
        assert format_of(worker)["elements"][1] == {"type": "json_schema", "json_schema": SCHEMA}


async def test_the_budget_ends_within_the_reasoning(router: RunningRouter, worker: FakeWorker) -> None:
    worker.answer = ids_of("<think>hm hm hm")
    num = len(worker.answer)
    for form in ({"response_format": FORMAT}, {"tools": [TOOL], "tool_choice": "required"}):
        for stream in (False, True):
            answer = await chat(router, stream=stream, max_tokens=num, **form)
            assert answer == ("hm hm hm", "", [], "length")


async def test_an_answer_that_goes_on_on_another_worker(start_worker: StartWorker, start_router: StartRouter) -> None:
    """Each worker is asked for the same form and told of all tokens so far."""
    workers = [await start_worker(), await start_worker()]
    for one in workers:
        one.chat_template, one.answer = chat_templates.HERMES, ids_of(JSON)
    workers[0].die_after = len(ids_of("<think>\nhm"))
    router = await start_router(*workers)
    for _ in range(2):  # one of them begins with the worker that fails
        assert await chat(router, stream=False, response_format=FORMAT) == ("hm {", '{"a": 1}', [], "stop")
    requests = [request for one in workers for request in one.requests]
    assert len({request.sampling_params.guided.structural_tag for request in requests}) == 1
    assert any(request.output_token_ids for request in requests)


@each_case(
    ("prompt_end", "is_thinking"),
    [("<think>\n", True), ("<think>\n\n</think>\n\n", False), ("", False)],
)
async def test_the_prompt_says_whether_the_answer_begins_with_reasoning(
    start_worker: StartWorker, start_router: StartRouter, prompt_end: str, is_thinking: bool
) -> None:
    worker = await start_worker()
    worker.chat_template = chat_templates.THINKS_AT_ONCE.replace("<think>\n", prompt_end)
    worker.answer = ids_of(JSON.removeprefix("<think>") if is_thinking else '{"a": 1}')
    router = await start_router(worker)
    wanted: tuple[str, str, list[object], str] = ("hm {" if is_thinking else "", '{"a": 1}', [], "stop")
    for stream in (False, True):
        assert await chat(router, stream=stream, response_format=FORMAT) == wanted
    guided = in_the_engine(worker.requests[-1]).guided
    assert guided is not None
    if not is_thinking:
        assert guided == Guided(json_schema=json.dumps(SCHEMA))
        return
    first = json.loads(guided.structural_tag)["format"]["elements"][0]
    assert first == {"type": "text_until", "end": {"type": "mark", "value": "</think>"}}


async def test_no_reasoning_if_the_template_has_a_switch(router: RunningRouter, worker: FakeWorker) -> None:
    worker.answer = ids_of('{"a": 1}')
    for fields in ({"reasoning_effort": "none"}, {"chat_template_kwargs": {"enable_thinking": False}}):
        answer = await chat(router, stream=False, response_format=FORMAT, **fields)
        assert answer == ("", '{"a": 1}', [], "stop")
        assert in_the_engine(worker.requests[-1]).guided == Guided(json_schema=json.dumps(SCHEMA))


@each_case(
    ("fields", "param", "words"),
    [
        ({"guided_json": {"not": {}}}, "guided_json", "json_schema"),
        ({"guided_json": "{"}, "guided_json", "json_schema"),
        ({"guided_regex": "("}, "guided_regex", "regex cannot be used"),
        ({"guided_grammar": "root ::= ("}, "guided_grammar", "grammar"),
        ({"response_format": {"type": "structural_tag", "format": {"type": "x"}}}, "response_format", "format.type"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "is not for guided text"),
    ],
)
async def test_what_is_wrong_is_told_in_the_client_s_words(
    router: RunningRouter, fields: dict[str, Any], param: str, words: str
) -> None:
    for tools in ({}, {"tools": [TOOL]}):
        with pytest.raises(openai.BadRequestError, match=words) as caught:
            await router.openai.chat.completions.create(model="tiny", messages=ASK, extra_body={**fields, **tools})
        assert caught.value.param == param
