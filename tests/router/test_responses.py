"""`/v1/responses`, through the official client."""

from __future__ import annotations

from typing import Any

import grpc
import httpx
import msgspec
import openai
import pytest

from common.types import FinishReason
from router.api.rest.openai.responses import ResponseAnswer
from router.api.rest.openai.responses_body import ResponsesBody
from router.api.rest.openai.responses_input import InputItem, items_of, turns_of
from router.running.request import OBJECT_BYTES, Output
from tests.each_case import each_case
from tests.router import chat_templates
from tests.router.conftest import RunningRouter, StartWorker
from tests.router.test_answer import REPORT, USAGE, FakeGeneration, requests
from tests.router.test_tools import prompt_of
from tests.router.tiny_tokenizer import byte_ids, ids_of
from tests.router.tool_calls import TWO_CALLS
from tests.support.fake_worker import ANSWER, FakeWorker
from text.answer_parts import TextPart, ToolCallDelta
from text.conversation import CallIds, ValueCount

TOOL: Any = {
    "type": "function",
    "name": "f",
    "description": "Does it",
    "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}},
    "strict": False,
}
SCHEMA: Any = {"type": "object"}
LOGPROBS: Any = ["message.output_text.logprobs"]


def call_item(**fields: str) -> dict[str, str]:
    return {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", **fields}


def message_of(text: str, **fields: object) -> dict[str, object]:
    """An answer's message, as clients send it back."""
    return {"role": "assistant", "content": [{"type": "output_text", "text": text, **fields}]}


@pytest.fixture
async def worker(start_worker: StartWorker) -> FakeWorker:
    worker = await start_worker()
    worker.chat_template = chat_templates.HERMES
    worker.answer = ids_of("Paris.")
    worker.false_info = {"max_model_len": 1024}
    return worker


async def test_text(router: RunningRouter, worker: FakeWorker) -> None:
    answer = await router.openai.responses.create(
        model="tiny", input="Where?", instructions="Be brief", store=False, metadata={"a": "b"}, temperature=0
    )
    assert answer.output_text == "Paris."
    assert (answer.status, answer.store if hasattr(answer, "store") else None) == ("completed", False)
    assert (answer.instructions, answer.metadata, answer.temperature) == ("Be brief", {"a": "b"}, 0)
    assert prompt_of(worker).startswith("<|im_start|>system\nBe brief<|im_end|>\n<|im_start|>user\nWhere?<|im_end|>")
    assert answer.usage is not None
    assert answer.usage.output_tokens == len(worker.answer) + 1
    assert answer.usage.input_tokens_details.cached_tokens == 3


async def test_calls_and_reasoning(router: RunningRouter, worker: FakeWorker) -> None:
    worker.answer = ids_of(TWO_CALLS)
    answer = await router.openai.responses.create(model="tiny", input="Do", tools=[TOOL], max_output_tokens=200)
    assert [item.type for item in answer.output] == ["reasoning", "message", "function_call", "function_call"]
    assert len({item.id for item in answer.output}) == 4
    assert answer.output_text == "Yes."
    calls = [item for item in answer.output if item.type == "function_call"]
    assert [(call.name, call.arguments) for call in calls] == [("f", '{"x": 1}'), ("f", '{"x": 2}')]
    assert answer.usage is not None
    assert answer.usage.output_tokens_details.reasoning_tokens > 0
    # What was answered can be sent back, with results.
    items: Any = [{"role": "user", "content": [{"type": "input_text", "text": "Do"}]}]
    items += [item.model_dump(by_alias=True) for item in answer.output]  # with a null for each field that is not set
    items += [{"type": "function_call_output", "call_id": call.call_id, "output": "done"} for call in calls]
    await router.openai.responses.create(model="tiny", input=items, tools=[TOOL], max_output_tokens=3)
    prompt = prompt_of(worker)
    call = '<tool_call>\n{"name": "f", "arguments": {"x": %d}}\n</tool_call>'
    assert f"<|im_start|>assistant\n<think>hm</think>Yes.{call % 1}{call % 2}<|im_end|>" in prompt
    assert prompt.count("<|im_start|>tool\ndone<|im_end|>") == 2


def test_texts_of_a_turn_are_joined_once() -> None:
    """Joined one by one, thousands of items would take seconds."""
    items = [InputItem(type="reasoning", content="a"), InputItem(type="reasoning", content="")] * 9
    (turn,) = turns_of(items_of(items))
    assert turn.thoughts == ["a"] * 9
    assert turn.message(ValueCount(), CallIds())["reasoning_content"] == "\n".join("a" * 9)


def test_lists_that_change_nothing_are_not_decoded() -> None:
    """Each entry would take some thirty times its bytes."""
    parts = {"type": "output_text", "text": "Yes", "annotations": [0] * 9, "logprobs": [0] * 9}
    body = {"input": [{"type": "message", "role": "assistant", "content": [parts]}]}
    item: Any = msgspec.json.decode(msgspec.json.encode(body), type=ResponsesBody).input[0]
    assert isinstance(item.content[0].annotations, msgspec.Raw)
    assert isinstance(item.content[0].logprobs, msgspec.Raw)


async def test_what_changes_nothing(router: RunningRouter, worker: FakeWorker) -> None:
    """docs/api.md has the list."""
    ask: dict[str, object] = {"role": "user", "content": "Do"}
    citation = {"type": "url_citation", "url": "x", "title": "t", "start_index": 0, "end_index": 1}
    logprob = {"token": "a", "bytes": [97], "logprob": -0.5, "top_logprobs": []}
    own = {"id": "msg_1", "status": "completed", "phase": "final_answer"}
    for inputs in (
        [ask, message_of("Yes"), ask],
        [ask, {**message_of("Yes", annotations=[citation], logprobs=[logprob]), **own}, {**ask, "status": None}],
    ):
        await router.openai.responses.create(model="tiny", input=inputs)  # type: ignore[arg-type]
    form: Any = {"type": "json_schema", "name": "n", "schema": SCHEMA}
    forms: tuple[Any, ...] = (form, {**form, "description": "d", "strict": False})
    for given in forms:
        answer = await router.openai.responses.create(model="tiny", input="x", text={"format": given})
        assert answer.text is not None
        told = answer.text.format
        assert told is not None
        assert told.model_dump(by_alias=True, exclude_none=True, exclude_unset=True) == given
    first, second, third, fourth = worker.requests
    assert first.prompt_token_ids == second.prompt_token_ids
    assert third.sampling_params.guided == fourth.sampling_params.guided


async def test_stream(router: RunningRouter, worker: FakeWorker) -> None:
    worker.answer = ids_of(TWO_CALLS)
    worker.hang_after = len(ids_of(TWO_CALLS[: TWO_CALLS.index("1}")]))
    events = []
    async with router.openai.responses.stream(model="tiny", input="Do", tools=[TOOL], max_output_tokens=200) as stream:
        async for event in stream:
            events.append(event)
            if event.type == "response.function_call_arguments.delta":
                worker.hang_after = None  # a call is shown while it is being written
        final = await stream.get_final_response()
    types = [event.type for event in events]
    assert types[:2] == ["response.created", "response.in_progress"]
    assert types[-1] == "response.completed"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert types.count("response.output_item.added") == types.count("response.output_item.done") == 4
    arguments = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(arguments) == '{"x": 1}{"x": 2}'
    assert '{"x": 1}'.startswith(arguments[0])
    assert arguments[0] != '{"x": 1}'
    reasoning = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(reasoning) == "hm"
    assert final.output_text == "Yes."
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call", "function_call"]


async def test_items_have_the_order_of_the_text_that_comes_at_once() -> None:
    """A speculating worker may send what is before, in and after a call in one event."""
    parts: list[TextPart | ToolCallDelta] = [
        TextPart("hm", is_reasoning=True),
        ToolCallDelta(0, "c1", "f", "{}"),
        TextPart("and so"),
        ToolCallDelta(1, "c2", "f", "{"),
        ToolCallDelta(1, arguments="}"),
        TextPart("done"),
    ]
    output = Output(
        text="and sodone",
        reasoning="hm",
        tool_calls=[part for part in parts if isinstance(part, ToolCallDelta)],
        parts=parts,
        tokens=[],
        finish_reason=FinishReason.TOOL_CALLS,
        report=REPORT,
        usage=USAGE,
    )
    held: list[int] = []
    answer = ResponseAnswer(FakeGeneration([output]), requests(1)[0], "r", {}, hold=held.append)  # type: ignore[arg-type]
    items: Any = (await answer.whole())["output"]
    texts = [item.get("arguments") or item["content"][0]["text"] for item in items]
    assert [item["type"] for item in items] == ["reasoning", "function_call", "message", "function_call", "message"]
    assert texts == ["hm", "{}", "and so", "{}", "done"]
    assert sum(num >= OBJECT_BYTES for num in held) == len(parts), "calls count as all else"


@pytest.mark.parametrize("answer", ["Paris.", "naïve 東京 😀", TWO_CALLS])
async def test_logprobs(router: RunningRouter, worker: FakeWorker, answer: str) -> None:
    """Of the message's own tokens, whole or as its text comes."""
    worker.answer = byte_ids(answer)
    body: Any = {"model": "tiny", "input": "x", "tools": [TOOL], "include": LOGPROBS, "top_logprobs": 2}
    whole = await router.openai.responses.create(**body, max_output_tokens=200)
    assert whole.top_logprobs == 2
    (message,) = [item for item in whole.output if item.type == "message"]
    (part,) = message.content
    assert part.type == "output_text"
    assert part.logprobs is not None
    told = b"".join(bytes(token.bytes) for token in part.logprobs).removesuffix(b"<|im_end|>")
    assert told.decode().strip() == part.text
    assert all(len(token.top_logprobs) == 2 and token.logprob == -0.5 for token in part.logprobs)
    stream = await router.openai.responses.create(**body, max_output_tokens=200, stream=True)
    events = [event async for event in stream]
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    (done,) = [event for event in events if event.type == "response.output_text.done"]
    tokens = [token.token for event in deltas for token in event.logprobs]
    assert tokens == [token.token for token in done.logprobs][: len(tokens)]
    assert [token.token for token in done.logprobs] == [token.token for token in part.logprobs]
    assert all(event.logprobs for event in deltas)


async def test_no_logprobs_unless_asked(router: RunningRouter, worker: FakeWorker) -> None:
    answer = await router.openai.responses.create(model="tiny", input="x")
    assert answer.output[0].content[0].logprobs == []  # type: ignore[union-attr, index]
    assert not worker.requests[0].sampling_params.HasField("logprobs")


async def test_an_answer_that_is_cut_off(router: RunningRouter) -> None:
    answer = await router.openai.responses.create(model="tiny", input="x", max_output_tokens=1)
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    stream = await router.openai.responses.create(model="tiny", input="x", max_output_tokens=1, stream=True)
    assert [event.type async for event in stream][-1] == "response.incomplete"


async def test_a_stream_that_fails(router: RunningRouter, worker: FakeWorker) -> None:
    worker.spoil = lambda event: event.tokens[0].__setattr__("token_id", 10**6) if worker.requests else None
    with pytest.raises(openai.APIStatusError):
        await router.openai.responses.create(model="tiny", input="x", stream=True)


@pytest.mark.parametrize("num_tokens", [1, 4])
async def test_a_stream_that_fails_after_its_first_token(
    router: RunningRouter, worker: FakeWorker, num_tokens: int
) -> None:
    """The status has been sent, so an event says it, with what has come of the answer."""
    worker.answer = ids_of(ANSWER)
    worker.die_after = num_tokens
    worker.spoil = lambda _: setattr(worker, "refuse", (grpc.StatusCode.INTERNAL, "it broke"))  # it goes on nowhere
    stream = await router.openai.responses.create(model="tiny", input="x", stream=True)
    events = [event async for event in stream]
    types = [event.type for event in events]
    assert types[:2] == ["response.created", "response.in_progress"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    told = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert ANSWER.startswith(told)
    assert told
    last = events[-1]
    assert last.type == "response.failed"
    assert not {"response.completed", "response.incomplete", "response.output_item.done"} & set(types)
    assert (last.response.status, last.response.usage) == ("failed", None)
    assert last.response.error is not None
    assert last.response.error.code == "server_error"
    assert "it broke" in last.response.error.message
    (item,) = last.response.output
    assert item.type == "message"
    assert (item.status, last.response.output_text) == ("incomplete", told)


@each_case(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": "x", "store": True}, "store"),
        ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": "x", "conversation": "c"}, "conversation"),
        ({"input": "x", "background": True}, "background"),
        ({"input": "x", "include": ["reasoning.encrypted_content", "file_search_call.results"]}, "include[1]"),
        ({"input": "x", "reasoning": {"effort": "much"}}, "reasoning.effort"),
        ({"input": "x", "reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"input": "x", "reasoning": {"generate_summary": "concise"}}, "reasoning.generate_summary"),
        ({"input": "x", "top_logprobs": 2}, "top_logprobs"),
        ({"input": "x", "include": LOGPROBS, "top_logprobs": 21}, "top_logprobs"),
        ({"input": "x", "include": LOGPROBS, "logprobs": 2}, "logprobs"),
        ({"input": "x", "truncation": "some"}, "truncation"),
        ({"input": "word " * 2000, "truncation": "auto"}, "input"),
        ({"input": "x", "text": {"verbosity": "low"}}, "text.verbosity"),
        ({"input": "x", "text": {"format": {"type": "yaml"}}}, "text.format.type"),
        ({"input": "x", "text": {"format": {"type": "text", "schema": {}}}}, "text.format.schema"),
        ({"input": "x", "text": {"format": {"type": "text", "strict": False}}}, "text.format.strict"),
        ({"input": "x", "text": {"format": {"type": "json_object", "schema": SCHEMA}}}, "text.format.schema"),
        ({"input": "x", "text": {"format": {"type": "json_object", "strict": True}}}, "text.format.strict"),
        ({"input": "x", "text": {"format": {"type": "json_object", "name": "n"}}}, "text.format.name"),
        ({"input": "x", "text": {"format": {"type": "text", "description": "d"}}}, "text.format.description"),
        ({"input": "x", "text": {"format": {"type": "json_schema", "name": 5, "schema": SCHEMA}}}, "text.format.name"),
        ({"input": "x", "text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
        ({"input": [{"role": "user", "content": "x", "status": 5}]}, "input[0].status"),
        ({"input": [{"role": "user", "content": "x", "phase": 5}]}, "input[0].phase"),
        ({"input": [message_of("x", annotations="none")]}, "input[0].content[0].annotations"),
        ({"input": [message_of("x", logprobs={})]}, "input[0].content[0].logprobs"),
        ({"input": [message_of("x", logprobs={})]}, "input[0].content[0].logprobs"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"input": "x", "tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice"),
        ({"input": "x", "tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice.name"),
        ({"input": "x", "stream": True, "stream_options": {"include_usage": True}}, "stream_options.include_usage"),
        ({"input": "x", "stream_options": {"include_obfuscation": False}}, "stream_options"),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "x", "max_tokens": 5}, "max_tokens"),
        ({"input": "x", "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"input": "x", "temperature": 9e9, "colour": 1}, "colour"),
        ({"input": "word " * 2000}, "input"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].image_url",
        ),
        ({"input": [{"role": "user", "content": "x", "arguments": "{}"}]}, "input[0].arguments"),
        ({"input": [{"role": "assistant", "content": "x"}, call_item(name="a b")]}, "input[1].name"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "", "output": "x"}]}, "input[0].call_id"),
        ({"input": [{"type": "reasoning", "summary": [], "output": "x"}]}, "input[0].output"),
        ({"input": [{"role": "user", "content": "x", "caller": {"type": "direct"}}]}, "input[0].caller"),
        ({"input": [{"type": "function_call", "name": "f", "call_id": "c", "async": True}]}, "input[0].async"),
        ({"input": [{"role": "user", "content": "x", "name": "a b"}]}, "input[0].name"),
        ({"input": "x", "service_tier": "flex"}, "service_tier"),
        ({"input": "x", "safety_identifier": 5}, "safety_identifier"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
    ],
)
async def test_what_is_refused(router: RunningRouter, body: dict[str, object], param: str) -> None:
    async with httpx.AsyncClient(base_url=router.url) as client:
        answer = await client.post("/v1/responses", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


async def test_pages(router: RunningRouter) -> None:
    async with httpx.AsyncClient(base_url=router.url) as client:
        page = await client.get("/docs")
        assert page.headers["content-type"].startswith("text/html")
        assert "/v1/responses" in page.text
        assert "ResponsesBody" in page.text
        assert "http://" not in page.text
        assert "https://" not in page.text
        assert "<script" not in page.text
        assert (await client.get("/ping")).json() == {"status": "ok"}
        assert set((await client.get("/version")).json()) == {"version"}
        described = (await client.get("/openapi.json")).json()
        assert {"/v1/responses", "/v1/embeddings", "/v1/chat/completions"} <= set(described["paths"])
