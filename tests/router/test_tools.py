"""Tools and reasoning through the router: what the model is told, and what clients get of its answers."""

from __future__ import annotations

import json
from typing import Any

import grpc
import httpx
import openai
import pytest
from llguidance import LLMatcher, LLTokenizer

from protos.baton.v1 import inference_pb2, types_pb2
from tests.each_case import each_case
from tests.router.conftest import RunningRouter, StartRouter, StartWorker
from tests.router.tiny_tokenizer import ids_of, tiny_tokenizer
from tests.router.tool_calls import ASK, TOOL, TWO_CALLS, TWO_TOOLS, worker
from tests.support.fake_worker import FakeWorker

__all__ = ["worker"]


NAMED: Any = {"type": "function", "function": {"name": "f"}}
ALLOWED: Any = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}]}
EARLIER: Any = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def prompt_of(worker: FakeWorker) -> str:
    return tiny_tokenizer().decode(list(worker.requests[-1].prompt_token_ids), skip_special_tokens=False)


def form_of(worker: FakeWorker) -> Any:
    """The form that the last answer has after its reasoning."""
    return json.loads(worker.requests[-1].sampling_params.guided.structural_tag)["format"]["elements"][-1]


def token_id(text: str) -> int:
    """Of a token of control."""
    found = tiny_tokenizer().rust.token_to_id(text)
    assert found is not None
    return found


async def test_calls(router: RunningRouter, worker: FakeWorker) -> None:
    answer = await router.openai.chat.completions.create(model="tiny", messages=ASK, tools=[TOOL], max_tokens=200)
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Yes."
    assert (choice.message.model_extra or {})["reasoning_content"] == "hm"
    calls = choice.message.tool_calls or []
    assert [(call.type, call.function.name, call.function.arguments) for call in calls if call.type == "function"] == [
        ("function", "f", '{"x": 1}'),
        ("function", "f", '{"x": 2}'),
    ]
    assert json.dumps(TOOL) in prompt_of(worker)
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.reasoning_tokens == len(ids_of("hm"))


async def test_streamed_calls(router: RunningRouter, worker: FakeWorker) -> None:
    worker.hang_after = len(ids_of(TWO_CALLS[: TWO_CALLS.index("1}")]))
    deltas = []
    async with router.openai.chat.completions.stream(
        model="tiny", messages=ASK, tools=[TOOL], max_tokens=200
    ) as stream:
        async for event in stream:
            if event.type == "tool_calls.function.arguments.delta":
                deltas.append(event.arguments_delta)
                worker.hang_after = None  # a call is shown while it is being written
    assert "".join(deltas) == '{"x": 1}{"x": 2}'
    assert '{"x": 1}'.startswith(deltas[0])
    assert deltas[0] != '{"x": 1}'
    final = (await stream.get_final_completion()).choices[0]
    assert final.finish_reason == "tool_calls"
    assert final.message.content == "Yes."
    assert [call.function.arguments for call in final.message.tool_calls or []] == ['{"x": 1}', '{"x": 2}']


async def test_one_call_alone_ends_the_answer(router: RunningRouter, worker: FakeWorker) -> None:
    for stream in (False, True):
        answer = await router.openai.chat.completions.create(
            model="tiny", messages=ASK, tools=[TOOL], max_tokens=200, parallel_tool_calls=False, stream=stream
        )
        if isinstance(answer, openai.AsyncStream):
            chunks = [chunk async for chunk in answer]
            calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
            assert {call.index for call in calls} == {0}
            assert chunks[-1].choices[0].finish_reason == "tool_calls"
        else:
            assert len(answer.choices[0].message.tool_calls or []) == 1
            assert answer.usage is not None
            assert answer.usage.completion_tokens < len(worker.answer) - 10


async def test_none_tells_the_model_of_no_tools(router: RunningRouter, worker: FakeWorker) -> None:
    answer = await router.openai.chat.completions.create(
        model="tiny", messages=ASK, tools=[TOOL], tool_choice="none", max_tokens=200
    )
    assert "Does it" not in prompt_of(worker)
    assert answer.choices[0].message.tool_calls is None
    assert "<tool_call>" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"


async def test_earlier_calls_and_results_are_in_the_prompt(router: RunningRouter, worker: FakeWorker) -> None:
    messages: Any = [
        {"role": "user", "content": "Do"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "Why",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": "<|im_end|>"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "done<|im_start|>"}]},
    ]
    await router.openai.chat.completions.create(model="tiny", messages=messages, tools=[TOOL], max_tokens=3)
    prompt = prompt_of(worker)
    assert '<think>Why</think><tool_call>\n{"name": "f", "arguments": {"x": "<|im_end|>"}}\n</tool_call>' in prompt
    assert "<|im_start|>tool\ndone<|im_start|><|im_end|>" in prompt
    # What clients wrote is text: control tokens come from the template alone.
    ids = list(worker.requests[-1].prompt_token_ids)
    assert ids.count(token_id("<|im_end|>")) == 4
    assert ids.count(token_id("<|im_start|>")) == 5


async def test_calls_without_an_id_are_paired_with_their_results_in_order(
    start_worker: StartWorker, start_router: StartRouter
) -> None:
    worker = await start_worker()
    worker.chat_template = (
        "{% if tools %}{% endif %}{% for m in messages %}{% for c in m.tool_calls or [] %}"
        "{{ c.function.name }}={{ c.id }} {% endfor %}"
        "{% if m.role == 'tool' %}{{ m.tool_call_id }}:{{ m.name }}:{{ m.content }} {% endif %}{% endfor %}"
    )
    router = await start_router(worker)
    calls = [{"id": "", "type": "function", "function": {"name": name, "arguments": "{}"}} for name in "fgf"]
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Do"},
        {"role": "assistant", "tool_calls": [calls[0]]},  # of which the result was lost
        {"role": "assistant", "tool_calls": [{**calls[2], "id": "own"}, *calls[:2]]},
        {"role": "tool", "tool_call_id": "", "content": "x"},
        {"role": "tool", "tool_call_id": "own", "content": "y"},
        {"role": "tool", "tool_call_id": "", "content": "z"},
    ]
    async with httpx.AsyncClient(base_url=router.url) as client:
        response = await client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 3})
        assert response.status_code == 200, response.text
        wanted = "f=call00001 f=own f=call00002 g=call00003 call00002:f:x own:f:y call00003:g:z "
        assert prompt_of(worker) == wanted
        items = [{"role": "user", "content": "Do"}]
        items += [{"type": "function_call", "call_id": "", "name": name, "arguments": "{}"} for name in "fg"]
        items += [{"type": "function_call_output", "call_id": "", "output": text} for text in "xz"]
        response = await client.post("/v1/responses", json={"input": items, "max_output_tokens": 3})
        assert response.status_code == 200, response.text
        assert prompt_of(worker) == "f=call00001 g=call00002 call00001:f:x call00002:g:z "
        messages.append({"role": "tool", "tool_call_id": "", "content": "of which call?"})
        refused = await client.post("/v1/chat/completions", json={"messages": messages})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages[6].tool_call_id")


async def test_fields_of_other_types_may_be_null(router: RunningRouter, worker: FakeWorker) -> None:
    messages = [
        *ASK,
        {"role": "assistant", "tool_calls": [{**EARLIER, "index": 0, "custom": None}]},
        {"role": "tool", "tool_call_id": "c1", "content": "done"},
    ]
    choice = {**NAMED, "custom": None, "allowed_tools": None}
    cases: tuple[tuple[Any, Any], ...] = (([{**TOOL, "custom": None}], choice), ([TOOL], NAMED))
    for tools, kind in cases:
        await router.openai.chat.completions.create(
            model="tiny", messages=messages, tools=tools, tool_choice=kind, max_tokens=3
        )
    first, second = worker.requests
    assert first.prompt_token_ids == second.prompt_token_ids
    assert first.sampling_params.guided == second.sampling_params.guided


async def test_control_tokens_in_tools_are_text(router: RunningRouter, worker: FakeWorker) -> None:
    tool = {
        "type": "function",
        "function": {
            "name": "f",
            "description": "<|im_end|>",
            "parameters": {"type": "object", "properties": {"<|im_end|>": {}}},
        },
    }
    await router.openai.chat.completions.create(model="tiny", messages=ASK, tools=[tool], max_tokens=3)  # type: ignore[list-item]
    assert prompt_of(worker).count("<|im_end|>") == 4
    assert list(worker.requests[-1].prompt_token_ids).count(token_id("<|im_end|>")) == 2


async def test_template_options(router: RunningRouter, worker: FakeWorker) -> None:
    worker.answer = ids_of("Yes.")
    answer = await router.openai.chat.completions.create(
        model="tiny", messages=ASK, extra_body={"chat_template_kwargs": {"enable_thinking": False}}
    )
    assert prompt_of(worker).endswith("<think>\n\n</think>\n\n")
    assert answer.choices[0].message.content == "Yes."


def tools(count: int = 1, **changes: object) -> list[object]:
    return [{"type": "function", "function": {"name": f"f{number}", **changes}} for number in range(count)]


def deep(depth: int) -> dict[str, Any]:
    return {"a": deep(depth - 1)} if depth else {}


def called(**changes: object) -> dict[str, object]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}", **changes}}
    return {"messages": [*ASK, {"role": "assistant", "content": None, "tool_calls": [call]}]}


BAD = {"type": "object", "properties": {"x": {"type": "array", "uniqueItems": True}}}
BREAKING = {"type": "object", "properties": {"x": {"const": -(2**63)}}}  # it ends a process that parses it
UNKEPT: dict[str, Any] = {"type": "function", "function": {"name": "bad", "parameters": BAD}}
STRICT = {"type": "function", "function": {**UNKEPT["function"], "strict": True}}
GOOD = {"type": "function", "function": {"name": "good", "strict": True}}


@each_case(
    ("body", "param"),
    [
        ({"tools": [GOOD, UNKEPT], "tool_choice": "required"}, "tools[1].function.parameters"),
        (
            {"tools": [TOOL, UNKEPT], "tool_choice": {"type": "function", "function": {"name": "bad"}}},
            "tools[1].function.parameters",
        ),
        ({"tools": [GOOD, TOOL, STRICT]}, "tools[2].function.parameters"),
        (
            {"tools": [{**UNKEPT, "function": {**UNKEPT["function"], "name": "free"}}, STRICT]},
            "tools[1].function.parameters",
        ),
    ],
)
async def test_the_tool_whose_schema_cannot_be_kept_is_named(
    router: RunningRouter, body: dict[str, object], param: str
) -> None:
    with pytest.raises(openai.BadRequestError, match="uniqueItems") as caught:
        await router.openai.chat.completions.create(model="tiny", messages=ASK, extra_body=body)
    assert caught.value.param == param


@each_case(
    ("body", "param"),
    [
        ({"tools": tools(129)}, "tools"),
        ({"tools": [*tools(), *tools()]}, "tools[1].function.name"),
        ({"tools": tools(name="no name")}, "tools[0].function.name"),
        ({"tools": tools(parameters={"type": "array"})}, "tools[0].function.parameters"),
        ({"tools": tools(parameters=deep(40))}, "tools[0].function.parameters"),
        ({"tools": tools(parameters=1)}, "tools[0].function.parameters"),
        ({"tools": tools(colour=1)}, "tools[0].function.colour"),
        ({"tools": tools(description="word " * 20_000)}, "tools"),
        ({"tools": tools(description="word " * 800)}, "messages"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type"),
        ({"tools": [TOOL, {"type": "custom", "name": "x", "format": {"type": "text"}}]}, "tools[1].type"),
        ({"tools": [{"type": "function", "name": "x"}]}, "tools[0].name"),
        ({"tools": [TOOL], "tool_choice": {"type": "mcp", "server_label": "x"}}, "tool_choice.type"),
        (
            {"messages": [*ASK, {"role": "assistant", "tool_calls": [{"id": "c", "type": "custom", "input": "x"}]}]},
            "messages[1].tool_calls[0].type",
        ),
        ({"guided_choice": [""]}, "guided_choice"),
        ({"structured_outputs": {"choice": [""]}}, "structured_outputs"),
        ({"guided": {"choice": [""]}}, "guided.choice"),
        ({"tools": [{**TOOL, "custom": {"name": "x"}}]}, "tools[0].custom"),
        ({"tools": [{**TOOL, "custom": {}}]}, "tools[0].custom"),
        ({"tools": [TOOL], "tool_choice": {**NAMED, "custom": {"name": "x"}}}, "tool_choice.custom"),
        ({"tools": [TOOL], "tool_choice": {**NAMED, "allowed_tools": ALLOWED}}, "tool_choice.allowed_tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": {**ALLOWED, "mode": "none"}}},
            "tool_choice.allowed_tools.mode",
        ),
        (
            {"tools": tools(), "tool_choice": {"type": "allowed_tools", "allowed_tools": ALLOWED}},
            "tool_choice.allowed_tools.tools",
        ),
        (
            {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": {**ALLOWED, "tools": []}}},
            "tool_choice.allowed_tools.tools",
        ),
        (
            {"messages": [*ASK, {"role": "assistant", "tool_calls": [{**EARLIER, "custom": {"input": "x"}}]}]},
            "messages[1].tool_calls[0].custom",
        ),
        ({"tools": tools(), "tool_choice": "maybe"}, "tool_choice"),
        ({"tools": tools(), "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"tools": tools(), "tool_choice": {"type": "custom"}}, "tool_choice.type"),
        (
            {"tools": tools(), "tool_choice": {"type": "function", "function": {"name": ""}}},
            "tool_choice.function.name",
        ),
        ({"messages": [{"role": "user", "content": "x", "name": "a b"}]}, "messages[0].name"),
        ({"tool_choice": "required"}, "tool_choice"),
        (called(arguments=json.dumps(deep(40))), "messages[1].tool_calls[0].function.arguments"),
        (called(name=""), "messages[1].tool_calls[0].function.name"),
        ({"messages": [*ASK, {"role": "tool", "content": "x"}]}, "messages[1].tool_call_id"),
        ({"messages": [{"role": "user", "content": "x", "tool_call_id": "c"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "user", "content": "x", "reasoning_content": "c"}]}, "messages[0].reasoning_content"),
        ({"messages": [{"role": "user", "content": "x", "reasoning": "c"}]}, "messages[0].reasoning"),
        (
            {"messages": [{"role": "assistant", "content": "x", "reasoning": "c", "reasoning_content": "d"}]},
            "messages[0].reasoning",
        ),
        ({"messages": [{"role": "assistant"}]}, "messages[0].content"),
        ({"chat_template_kwargs": {"nothing": 1}}, "chat_template_kwargs.nothing"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"chat_template_kwargs": deep(40)}, "chat_template_kwargs"),
    ],
)
async def test_what_is_refused(router: RunningRouter, body: dict[str, object], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await router.openai.chat.completions.create(model="tiny", messages=ASK, extra_body=body)
    assert caught.value.param == param


async def test_over_grpc(router: RunningRouter, worker: FakeWorker) -> None:
    function = TOOL["function"]
    request = inference_pb2.ChatRequest(
        messages=[
            inference_pb2.ChatMessage(role="user", content="Do"),
            inference_pb2.ChatMessage(
                role="assistant", tool_calls=[inference_pb2.ToolCall(id="c1", name="f", arguments='{"x": 7}')]
            ),
            inference_pb2.ChatMessage(role="tool", tool_call_id="c1", content="done"),
        ],
        tools=[inference_pb2.Tool(name="f", description="Does it", parameters=json.dumps(function["parameters"]))],
        sampling_params=types_pb2.SamplingParams(max_tokens=200),
    )
    responses = [response async for response in router.inference.Chat(request)]
    assert json.dumps(TOOL) in prompt_of(worker)
    assert '{"name": "f", "arguments": {"x": 7}}' in prompt_of(worker)
    assert "".join(response.text for response in responses) == "Yes."
    assert "".join(response.reasoning for response in responses) == "hm"
    deltas = [delta for response in responses for delta in response.tool_calls]
    assert [delta.name for delta in deltas if delta.id] == ["f", "f"]
    assert "".join(delta.arguments for delta in deltas if delta.index == 1) == '{"x": 2}'
    assert responses[-1].finish_reason == types_pb2.FINISH_REASON_TOOL_CALLS
    assert responses[-1].usage.reasoning_tokens == len(ids_of("hm"))
    for change, field in (
        (
            inference_pb2.ChatRequest(tools=[inference_pb2.Tool(name="f", parameters="[]")]),
            "tools[0].parameters",
        ),
        (inference_pb2.ChatRequest(tool_choice=inference_pb2.ToolChoice(name="g")), "tool_choice"),
        (inference_pb2.ChatRequest(tool_choice=inference_pb2.ToolChoice(name="")), "tool_choice.name"),
        (inference_pb2.ChatRequest(chat_template_kwargs="{"), "chat_template_kwargs"),
    ):
        change.messages.add(role="user", content="x")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await router.inference.Chat(change).read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert (caught.value.details() or "").startswith(field)


async def test_models_without_a_known_shape_of_calls(start_worker: StartWorker, start_router: StartRouter) -> None:
    worker = await start_worker()
    worker.chat_template = "{{ tools }}{% for message in messages %}{{ message.content }}{% endfor %}"
    worker.false_info = {"max_model_len": 4096}
    router = await start_router(worker, generic_tools=False)
    with pytest.raises(openai.BadRequestError) as caught:
        await router.openai.chat.completions.create(model="tiny", messages=ASK, tools=[TOOL])
    assert caught.value.param == "tools"
    await router.openai.chat.completions.create(model="tiny", messages=ASK, tools=[TOOL], tool_choice=NAMED)
    assert prompt_of(worker).startswith("[{"), "its own words, as a forced call is read in any shape"
    router = await start_router(worker)
    await router.openai.chat.completions.create(model="tiny", messages=ASK, tools=[TOOL])
    assert prompt_of(worker).startswith("NoneYou can call")


async def test_usage_so_far(router: RunningRouter) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}  # the second is of other servers
    stream = await router.openai.chat.completions.create(
        model="tiny",
        messages=ASK,
        stream=True,
        max_tokens=20,
        stream_options=options,
    )
    counts = [chunk.usage.completion_tokens async for chunk in stream if chunk.usage]
    assert counts[0] == 0
    assert counts == sorted(counts)
    assert counts[-1] == 20


async def test_names_of_speakers_are_for_the_template(start_worker: StartWorker, start_router: StartRouter) -> None:
    worker = await start_worker()
    worker.chat_template = "{% for message in messages %}{{ message.name }}: {{ message.content }}{% endfor %}"
    router = await start_router(worker)
    messages: Any = [{"role": "user", "content": "Hello", "name": "ann"}]
    await router.openai.chat.completions.create(model="tiny", messages=messages)
    assert prompt_of(worker) == "ann: Hello"


@each_case("parallel", [True, False])
async def test_required(router: RunningRouter, worker: FakeWorker, parallel: bool) -> None:
    worker.answer = ids_of('[{"name": "f", "parameters": {"x": 1}}, {"name": "g", "parameters": {}}]')
    answer = await router.openai.chat.completions.create(
        model="tiny", messages=ASK, tools=TWO_TOOLS, tool_choice="required", parallel_tool_calls=parallel
    )
    schema = form_of(worker)["json_schema"]
    assert schema.get("maxItems") == (None if parallel else 1)
    assert [one["properties"]["name"]["const"] for one in schema["items"]["anyOf"]] == ["f", "g"]
    assert schema["$defs"]["t1"]["additionalProperties"] is False
    choice = answer.choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    calls = [call.function for call in choice.message.tool_calls or [] if call.type == "function"]
    assert [(call.name, call.arguments) for call in calls] == [("f", '{"x": 1}'), ("g", "{}")]


async def test_a_named_tool(router: RunningRouter, worker: FakeWorker) -> None:
    worker.answer = ids_of('{"x": 1}')
    worker.hang_after = 4
    choice: Any = {"type": "function", "function": {"name": "f"}}
    stream = await router.openai.chat.completions.create(
        model="tiny", messages=ASK, tools=TWO_TOOLS, tool_choice=choice, stream=True
    )
    chunks = []
    async for chunk in stream:
        chunks.append(chunk)
        if chunk.choices[0].delta.tool_calls:
            worker.hang_after = None  # a call is shown while it is being written
    deltas = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert [call.function.name for call in deltas if call.id and call.function] == ["f"]
    assert "".join(call.function.arguments or "" for call in deltas if call.function) == '{"x": 1}'
    assert len(deltas) > 1
    assert chunks[-1].choices[0].finish_reason == "stop", "as OpenAI has it for a tool that was named"
    assert form_of(worker)["json_schema"] == TOOL["function"]["parameters"]


@each_case(
    ("body", "param"),
    [
        ({"tools": tools(strict=True, parameters={"type": "object", "not": {}})}, "tools[0].function.parameters"),
        (
            {"tool_choice": "required", "tools": tools(parameters={"type": "object", "not": {}})},
            "tools[0].function.parameters",
        ),
        ({"tools": tools(strict=True, parameters=BREAKING)}, "tools[0].function.parameters"),
        ({"tool_choice": "required", "tools": tools(parameters=BREAKING)}, "tools[0].function.parameters"),
    ],
)
async def test_forms_that_cannot_be_kept(router: RunningRouter, body: dict[str, object], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await router.openai.chat.completions.create(model="tiny", messages=ASK, extra_body=body)
    assert caught.value.param == param


DATA = {"$ref": "#/$defs/A"}
ADDRESSED = {"$id": "https://example.com/tool", "$defs": {"A": {"$anchor": "here", "type": "integer"}}}


@pytest.mark.parametrize(
    ("parameters", "good", "bad"),
    [
        ({"properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"type": "integer"}}}, {"a": 1}, {"a": "x"}),
        ({**ADDRESSED, "properties": {"a": {"$ref": "#here"}}}, {"a": 1}, {"a": "x"}),
        ({**ADDRESSED, "properties": {"a": {"$ref": "tool#/$defs/A"}}}, {"a": 1}, {"a": "x"}),
        ({"properties": {"a": {"const": DATA}}}, {"a": DATA}, {"a": {"$ref": "#/$defs/t1/$defs/A"}}),
        ({"properties": {"a": {"enum": [DATA]}}}, {"a": DATA}, {"a": {"$ref": "#/$defs/t1/$defs/A"}}),
        ({"properties": {"a": {"type": "integer", "default": DATA}}}, {"a": 1}, {"a": "x"}),
        ({"properties": {"$ref": {"type": "integer"}}}, {"$ref": 1}, {"$ref": "x"}),
        ({"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, {"a": 1}, {}),
        ({"required": ["a"]}, {"a": 1}, {}),
        ({"minProperties": 1}, {"a": 1}, {}),
        ({"properties": {}, "required": []}, {}, {"a": 1}),
    ],
    ids=str,
)
@pytest.mark.parametrize("choice", ["required", "named"])
def test_schemas_of_several_tools(parameters: dict[str, object], good: object, bad: object, choice: str) -> None:
    """Each as if its tool were the only one. Two of them have the same id."""
    from common.guided import check_grammar, check_guided, grammar_of
    from text.conversation import Tool, Tools
    from text.forced_calls import forced_guide

    made = (Tool(name="f", parameters={**ADDRESSED, "required": ["z"]}), Tool(name="g", parameters=parameters))
    named = "g" if choice == "named" else ""
    guided = forced_guide(Tools(tools=made, choice="required", named=named))
    check_guided(guided)
    check_grammar(guided)

    def takes(arguments: object) -> bool:
        text = json.dumps(arguments if named else [{"name": "g", "parameters": arguments}])
        matcher = LLMatcher(LLTokenizer("byte"), grammar_of(guided), log_level=0)
        return bool(matcher.try_consume_tokens(list(text.encode())) == len(text.encode()) and matcher.is_accepting())

    assert takes(good)
    assert not takes(bad)


@pytest.mark.parametrize("named", ["", "f"])
def test_a_tools_long_schema_is_counted_in_characters_of_its_text(named: str) -> None:
    from common.guided import check_guided
    from text.conversation import Tool, Tools
    from text.forced_calls import forced_guide

    guided = forced_guide(
        Tools(tools=(Tool(name="f", parameters={"const": "漢" * 11_000}),), choice="required", named=named)
    )
    check_guided(guided)
    assert len(guided.json_schema) < 12_000


CUT = '<tool_call>{"name": "f", "arguments": {"x": "one'
WHOLE_AND_CUT = TWO_CALLS[: TWO_CALLS.index("2}")]


@each_case(
    ("answer", "options", "reason"),
    [
        (CUT, {}, "stop"),
        (CUT, {"stop": ["one"]}, "stop"),
        (CUT, {"max_tokens": len(ids_of(CUT)) - 1}, "length"),
        (WHOLE_AND_CUT, {}, "stop"),
        ('{"x": "one', {"tool_choice": NAMED, "stop": ["one"]}, "stop"),
        ('{"x": 1}', {"tool_choice": NAMED, "max_tokens": 1}, "length"),
        ('[{"name": "f", "parameters": {"x": "one', {"tool_choice": "required", "stop": ["one"]}, "stop"),
    ],
)
async def test_an_answer_that_ends_inside_a_call_has_the_reason_that_it_was(
    router: RunningRouter, worker: FakeWorker, answer: str, options: dict[str, Any], reason: str
) -> None:
    worker.answer = ids_of(answer)
    body: dict[str, Any] = {"model": "tiny", "messages": ASK, "tools": [TOOL], "max_tokens": 200, **options}
    whole = (await router.openai.chat.completions.create(**body)).choices[0]
    assert whole.finish_reason == reason
    calls = [call.function for call in whole.message.tool_calls or []]
    assert calls[-1].name == "f", "what was written of the call is there"
    with pytest.raises(ValueError, match="line 1"):
        json.loads(calls[-1].arguments)
    chunks = [chunk async for chunk in await router.openai.chat.completions.create(**body, stream=True)]
    assert chunks[-1].choices[0].finish_reason == reason

    if "stop" not in options:
        body.pop("messages")
        body["max_output_tokens"] = body.pop("max_tokens")
        body["tools"] = [{"type": "function", **TOOL["function"]}]
        if "tool_choice" in options:
            body["tool_choice"] = {"type": "function", "name": "f"}
        response = await router.openai.responses.create(**body, input="Do")
        assert response.status == "incomplete"
        assert response.output[-1].status == "incomplete"
        why = response.incomplete_details
        assert (why and why.reason) == ("max_output_tokens" if reason == "length" else None)


@each_case("text", ["[", '[{"name": "f'])
async def test_the_beginning_of_a_forced_call_is_no_content(
    router: RunningRouter, worker: FakeWorker, text: str
) -> None:
    worker.answer = ids_of(text + '", "parameters": {}}]')
    num_tokens = len(ids_of(text))
    body: dict[str, Any] = {"model": "tiny", "tools": TWO_TOOLS, "tool_choice": "required"}
    chat = {**body, "messages": ASK, "max_tokens": num_tokens}
    whole = (await router.openai.chat.completions.create(**chat)).choices[0]
    assert (whole.finish_reason, whole.message.content or "", whole.message.tool_calls) == ("length", "", None)
    chunks = [chunk async for chunk in await router.openai.chat.completions.create(**chat, stream=True)]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ""
    assert chunks[-1].choices[0].finish_reason == "length"

    body["tools"] = [{"type": "function", **tool["function"]} for tool in TWO_TOOLS]
    asked = {**body, "input": "Do", "max_output_tokens": num_tokens}
    response = await router.openai.responses.create(**asked)
    assert (response.status, response.output_text) == ("incomplete", "")
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    events = [event async for event in await router.openai.responses.create(**asked, stream=True)]
    assert not [event for event in events if event.type == "response.output_text.delta"]
    assert events[-1].type == "response.incomplete"


async def test_a_mark_inside_a_string_of_a_strict_call(router: RunningRouter, worker: FakeWorker) -> None:
    arguments = '{"x": "say </tool_call> now"}'
    worker.answer = ids_of(f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>')
    strict = {"type": "function", "function": {"name": "f", "strict": True, "parameters": TEXT_OR_NOTHING}}
    answer = await router.openai.chat.completions.create(
        model="tiny",
        messages=ASK,
        tools=[strict],  # type: ignore[list-item]
        max_tokens=200,
    )
    choice = answer.choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    (call,) = choice.message.tool_calls or []
    assert call.type == "function"
    assert call.function.arguments == arguments


TEXT_OR_NOTHING = {"type": "object", "properties": {"x": {"type": "string"}}, "additionalProperties": False}


# A template that takes no system message, and one that knows nothing but its messages.
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant{{ '\n' }}"
)
PLAIN = NO_SYSTEM[NO_SYSTEM.index("{% for") :]
HISTORY: Any = [
    *ASK,
    {"role": "assistant", "content": "So:", "tool_calls": [EARLIER]},
    {"role": "tool", "tool_call_id": "c1", "content": "done<|im_end|>"},
    {"role": "user", "content": "And?"},
]


def notes_of(answer: Any) -> list[str]:
    return list((answer.model_extra or {})["baton"].get("notes", []))


@pytest.fixture
async def plain(start_worker: StartWorker) -> FakeWorker:
    worker = await start_worker()
    worker.chat_template = PLAIN
    worker.answer = ids_of(TWO_CALLS[TWO_CALLS.index("Yes.") :])
    worker.false_info = {"max_model_len": 4096}
    return worker


async def test_a_template_without_tools_is_told_of_them_in_words(start_router: StartRouter, plain: FakeWorker) -> None:
    router = await start_router(plain)
    ask: Any = {"model": "tiny", "max_tokens": 200, "tools": [TOOL]}
    system: list[Any] = [{"role": "system", "content": "Be brief"}]
    answer = await router.openai.chat.completions.create(messages=[*system, *HISTORY], **ask)
    prompt = prompt_of(plain)
    assert prompt.startswith("<|im_start|>system\nBe brief\n\nYou can call")
    assert json.dumps(TOOL["function"]) in prompt
    called = 'So:\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    result = "<tool_response>\ndone<|im_end|>\n</tool_response>\nAnd?"
    assert prompt.endswith(
        f"<|im_start|>assistant\n{called}<|im_end|>\n<|im_start|>user\n{result}<|im_end|>\n<|im_start|>assistant\n"
    )
    ends = list(plain.requests[-1].prompt_token_ids).count(token_id("<|im_end|>"))
    assert ends == 4, "what clients wrote is text"
    choice = answer.choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Yes.")
    calls: list[Any] = choice.message.tool_calls or []
    assert [call.function.arguments for call in calls] == ['{"x": 1}', '{"x": 2}']
    assert len(notes_of(answer)) == 1
    assert "no form" in notes_of(answer)[0]

    chunks = [one async for one in await router.openai.chat.completions.create(messages=ASK, stream=True, **ask)]
    assert prompt_of(plain).startswith("<|im_start|>system\nYou can call")
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    assert (
        "".join(call.function.arguments or "" for one in chunks for call in one.choices[0].delta.tool_calls or [])
        == '{"x": 1}{"x": 2}'
    )

    function: Any = {"type": "function", **TOOL["function"]}
    items = await router.openai.responses.create(model="tiny", input="Do", tools=[function])
    assert [item.type for item in items.output] == ["message", "function_call", "function_call"]
    assert notes_of(items)

    request = inference_pb2.ChatRequest(
        messages=[inference_pb2.ChatMessage(role="user", content="Do")],
        tools=[inference_pb2.Tool(name="f")],
        sampling_params=types_pb2.SamplingParams(max_tokens=200),
    )
    last = [one async for one in router.inference.Chat(request)][-1]
    assert last.finish_reason == types_pb2.FINISH_REASON_TOOL_CALLS
    assert "no form" in last.report.notes[0]


async def test_generic_tools_strict_and_forced(start_router: StartRouter, plain: FakeWorker) -> None:
    router = await start_router(plain)
    ask: Any = {"model": "tiny", "messages": ASK, "max_tokens": 200}
    strict: Any = {"type": "function", "function": {**TOOL["function"], "strict": True}}
    await router.openai.chat.completions.create(tools=[strict], **ask)
    tag = json.loads(plain.requests[-1].sampling_params.guided.structural_tag)
    (call,) = tag["format"]["tags"]
    assert call["begin"]["value"] == "<tool_call>"
    assert call["content"]["elements"][1]["json_schema"] == TOOL["function"]["parameters"]
    plain.answer = ids_of('{"x": 1}')
    answer = await router.openai.chat.completions.create(tools=[TOOL], tool_choice=NAMED, **ask)
    assert [call.function.arguments for call in answer.choices[0].message.tool_calls] == ['{"x": 1}']
    assert json.loads(plain.requests[-1].sampling_params.guided.json_schema) == TOOL["function"]["parameters"]
    assert "You can call" in prompt_of(plain)


async def test_generic_tools_without_a_system_message(start_router: StartRouter, plain: FakeWorker) -> None:
    plain.chat_template = NO_SYSTEM
    router = await start_router(plain)
    ask = {"model": "tiny", "messages": ASK, "max_tokens": 200}
    await router.openai.chat.completions.create(tools=[TOOL], parallel_tool_calls=False, **ask)
    assert prompt_of(plain).startswith("<|im_start|>user\nYou can call")
    assert "Make one call" in prompt_of(plain)
    assert "plain words.\n\nDo<|im_end|>" in prompt_of(plain)
    answer = await router.openai.chat.completions.create(**ask)
    assert prompt_of(plain) == "<|im_start|>user\nDo<|im_end|>\n<|im_start|>assistant\n"
    assert notes_of(answer) == []


async def test_generic_tools_are_off_by_a_setting(start_router: StartRouter, plain: FakeWorker) -> None:
    router = await start_router(plain, generic_tools=False)
    with pytest.raises(openai.BadRequestError) as caught:
        await router.openai.chat.completions.create(model="tiny", messages=ASK, tools=[TOOL])
    assert caught.value.param == "tools"


async def test_a_template_that_does_not_compile(
    start_router: StartRouter, plain: FakeWorker, caplog: pytest.LogCaptureFixture
) -> None:
    plain.chat_template = "{% if messages %}\n{{ messages | }}\n{% endif %}"
    router = await start_router(plain)
    with pytest.raises(openai.BadRequestError, match=r"chat_template\.jinja.*line 2.*expected token") as caught:
        await router.openai.chat.completions.create(model="tiny", messages=ASK)
    assert caught.value.param == "messages"
    assert (await router.openai.completions.create(model="tiny", prompt="Do")).choices
    (line,) = [one for one in caplog.records if one.levelname == "ERROR"]
    assert "chat_template.jinja" in vars(line)["reason"]


async def test_only_allowed_tools_are_called(router: RunningRouter, worker: FakeWorker) -> None:
    choice: Any = {"type": "allowed_tools", "allowed_tools": ALLOWED}
    other = '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
    ask: Any = {"model": "tiny", "messages": ASK, "tools": TWO_TOOLS, "max_tokens": 200}
    for stream in (False, True):
        worker.answer = ids_of(f"{other}{TWO_CALLS}")
        answer = await router.openai.chat.completions.create(**ask, tool_choice=choice, stream=stream)
        assert '"name": "g"' in prompt_of(worker), "the model is told of all"
        form = worker.requests[-1].sampling_params.guided.structural_tag
        assert json.dumps('\n{"name": "f", "arguments": ') in form
        assert json.dumps('"name": "g"')[1:-1] not in form
        if isinstance(answer, openai.AsyncStream):
            deltas = [chunk.choices[0].delta async for chunk in answer]
            assert {call.index for one in deltas for call in one.tool_calls or []} == {0, 1}
            assert other in "".join(one.content or "" for one in deltas)
        else:
            message: Any = answer.choices[0].message
            assert [call.function.name for call in message.tool_calls] == ["f", "f"]
            assert other in message.content

    worker.answer = ids_of('[{"name": "f", "parameters": {"x": 1}}]')
    required: Any = {**choice, "allowed_tools": {**ALLOWED, "mode": "required"}}
    answer = await router.openai.chat.completions.create(**ask, tool_choice=required)
    assert answer.choices[0].finish_reason == "tool_calls"
    guided = worker.requests[-1].sampling_params.guided
    assert '"name": {"const": "f"}' in guided.structural_tag
    assert '"const": "g"' not in guided.structural_tag

    functions: Any = [{"type": "function", **tool["function"]} for tool in TWO_TOOLS]
    allowed: Any = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "f"}]}
    items = await router.openai.responses.create(model="tiny", input="Do", tools=functions, tool_choice=allowed)
    assert worker.requests[-1].sampling_params.guided == guided
    assert items.tool_choice.model_dump() == allowed  # type: ignore[union-attr]

    request = inference_pb2.ChatRequest(
        messages=[inference_pb2.ChatMessage(role="user", content="Do")],
        tools=[
            inference_pb2.Tool(name="f", parameters=json.dumps(TOOL["function"]["parameters"])),
            inference_pb2.Tool(name="g"),
        ],
        tool_choice=inference_pb2.ToolChoice(mode=inference_pb2.ToolChoice.MODE_REQUIRED, allowed=["f"]),
    )
    _ = [one async for one in router.inference.Chat(request)]
    assert worker.requests[-1].sampling_params.guided == guided
    request.tool_choice.allowed[:] = ["h"]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        _ = [one async for one in router.inference.Chat(request)]
    assert (caught.value.details() or "").startswith("tool_choice.allowed")


@each_case("arguments", ['{"x": "Par', "[]", "not JSON", "[" * 300, '{"x": "\\ud800"}'])
async def test_a_call_that_was_cut_is_sent_back(router: RunningRouter, worker: FakeWorker, arguments: str) -> None:
    answer = await router.openai.chat.completions.create(
        model="tiny", tools=[TOOL], extra_body=called(arguments=arguments), messages=ASK
    )
    assert json.dumps(arguments) in prompt_of(worker)
    assert notes_of(answer) == [
        "messages: the arguments of call 'c' are not the JSON text of an object; passed on as they are"
    ]
    item: Any = {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments}
    items = await router.openai.responses.create(model="tiny", input=[{"role": "user", "content": "Do"}, item])
    assert notes_of(items) == notes_of(answer)


async def test_templates_that_read_arguments_member_by_member(start_router: StartRouter, worker: FakeWorker) -> None:
    worker.chat_template = (
        "{% for message in messages %}{{ message.content }}{% for call in message.tool_calls or [] %}"
        "{% for key, value in call.function.arguments | items %}<{{ key }}={{ value }}>{% endfor %}{% endfor %}"
        "{% endfor %}"
    )
    router = await start_router(worker)
    body = called(arguments='{"x": "Par')
    await router.openai.chat.completions.create(model="tiny", messages=ASK, extra_body=body)
    assert prompt_of(worker) == 'Do<arguments={"x": "Par>'


async def test_half_a_character_is_blamed_on_its_own_field(router: RunningRouter) -> None:
    for changes, field in (
        ({"chat_template_kwargs": '{"a": "\\ud800"}'}, "chat_template_kwargs"),
        (
            {"tools": [inference_pb2.Tool(name="f", parameters='{"title": "\\udc00"}')]},
            "tools[0].parameters",
        ),
    ):
        request = inference_pb2.ChatRequest(messages=[inference_pb2.ChatMessage(role="user", content="Do")], **changes)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            _ = [one async for one in router.inference.Chat(request)]
        assert (caught.value.details() or "").startswith(f"{field}: is not valid Unicode")


@each_case(
    ("body", "param"),
    [
        ({"tools": [{"type": "web_search", "filters": {}}]}, "tools[0].type"),
        ({"tool_choice": {"type": "mcp", "server_label": "x"}}, "tool_choice.type"),
        ({"input": [{"role": "user", "content": "x"}, {"type": "shell_call", "action": {}}]}, "input[1].type"),
        ({"tools": [{"type": "function", "name": "no name"}]}, "tools[0].name"),
        (
            {"tools": [{"type": "function", "name": "f"}], "tool_choice": {"type": "function", "mode": "auto"}},
            "tool_choice.mode",
        ),
    ],
)
async def test_tools_that_responses_refuse(router: RunningRouter, body: dict[str, object], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await router.openai.responses.create(model="tiny", input="Do", extra_body=body)
    assert caught.value.param == param
