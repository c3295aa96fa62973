"""The same question through each interface: the same text, parts, usage and end of the answer."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from protos.baton.v1 import inference_pb2, types_pb2
from tests.each_case import each_case
from tests.router.conftest import RunningRouter
from tests.router.tiny_tokenizer import ids_of
from tests.router.tool_calls import TWO_CALLS, worker
from tests.support.fake_worker import ANSWER, FakeWorker

__all__ = ["worker"]

Json = dict[str, Any]
SYSTEM, QUESTION = "Be brief", "Do"
NAME, DESCRIPTION, SCHEMA = "f", "Does it", {"type": "object", "properties": {"x": {"type": "integer"}}}
FUNCTION: Json = {"name": NAME, "description": DESCRIPTION, "parameters": SCHEMA}
CHAT: Json = {
    "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}],
    "tools": [{"type": "function", "function": FUNCTION}],
}
REASONS = {
    "end": ("stop", "completed", "end_turn", types_pb2.FINISH_REASON_STOP),
    "stop text": ("stop", "completed", "stop_sequence", types_pb2.FINISH_REASON_STOP),
    "limit": ("length", "incomplete", "max_tokens", types_pb2.FINISH_REASON_LENGTH),
    "calls": ("tool_calls", "completed", "tool_use", types_pb2.FINISH_REASON_TOOL_CALLS),
}
"""The end of an answer in the words of OpenAI's chat, of its responses, of Anthropic, and of gRPC."""


@dataclass(slots=True)
class Asked:
    stop: list[str] = field(default_factory=list)
    max_tokens: int = 200


@dataclass(slots=True)
class Said:
    text: str = ""
    reasoning: str = ""
    calls: list[tuple[str, Json]] = field(default_factory=list)
    num_tokens: tuple[int, int, int] = (0, 0, 0)  # of the prompt, of these cached, of the answer
    reason: object = None


@pytest.fixture
async def http(router: RunningRouter) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=router.url, timeout=60) as client:
        yield client


async def post(http: httpx.AsyncClient, path: str, body: Json) -> Json:
    answer = await http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    whole: Json = answer.json()
    return whole


async def events(http: httpx.AsyncClient, path: str, body: Json) -> list[Json]:
    answer = await http.post(path, json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    datas = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(data) for data in datas if data != "[DONE]"]


def chat_body(asked: Asked) -> Json:
    return {**CHAT, "max_tokens": asked.max_tokens, "stop": asked.stop}


def of_usage(usage: Json) -> tuple[int, int, int]:
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"], usage["completion_tokens"]


async def chat(_router: RunningRouter, http: httpx.AsyncClient, asked: Asked) -> Said:
    answer = await post(http, "/v1/chat/completions", chat_body(asked))
    (choice,) = answer["choices"]
    message = choice["message"]
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    return Said(
        text=message["content"] or "",
        reasoning=message.get("reasoning_content", ""),
        calls=[(one["name"], json.loads(one["arguments"])) for one in functions],
        num_tokens=of_usage(answer["usage"]),
        reason=choice["finish_reason"],
    )


async def chat_stream(_router: RunningRouter, http: httpx.AsyncClient, asked: Asked) -> Said:
    said, names, arguments = Said(), list[str](), list[str]()
    body = {**chat_body(asked), "stream_options": {"include_usage": True}}
    for chunk in await events(http, "/v1/chat/completions", body):
        if chunk["usage"]:
            said.num_tokens = of_usage(chunk["usage"])
        for choice in chunk["choices"]:
            said.text += choice["delta"].get("content", "")
            said.reasoning += choice["delta"].get("reasoning_content", "")
            said.reason = choice["finish_reason"] or said.reason
            for call in choice["delta"].get("tool_calls", ()):
                if "id" in call:
                    names.append(call["function"]["name"])
                    arguments.append("")
                arguments[-1] += call["function"]["arguments"]
    said.calls = [(name, json.loads(text)) for name, text in zip(names, arguments, strict=True)]
    return said


def of_response(response: Json) -> Said:
    def texts(kind: str) -> str:
        return "".join(part["text"] for item in response["output"] if item["type"] == kind for part in item["content"])

    calls = [item for item in response["output"] if item["type"] == "function_call"]
    usage = response["usage"]
    cached = usage["input_tokens_details"]["cached_tokens"]
    return Said(
        text=texts("message"),
        reasoning=texts("reasoning"),
        calls=[(call["name"], json.loads(call["arguments"])) for call in calls],
        num_tokens=(usage["input_tokens"], cached, usage["output_tokens"]),
        reason=response["status"],
    )


def responses_body(asked: Asked) -> Json:
    tools = [{"type": "function", **FUNCTION}]
    limits = {"max_output_tokens": asked.max_tokens, "stop": asked.stop}
    return {"input": QUESTION, "instructions": SYSTEM, "tools": tools, **limits}


async def responses(_router: RunningRouter, http: httpx.AsyncClient, asked: Asked) -> Said:
    return of_response(await post(http, "/v1/responses", responses_body(asked)))


async def responses_stream(_router: RunningRouter, http: httpx.AsyncClient, asked: Asked) -> Said:
    told = await events(http, "/v1/responses", responses_body(asked))
    return of_response(told[-1]["response"])


def messages_body(asked: Asked) -> Json:
    tool = {"name": NAME, "description": DESCRIPTION, "input_schema": SCHEMA}
    limits = {"max_tokens": asked.max_tokens, "stop_sequences": asked.stop}
    return {"system": SYSTEM, "messages": [{"role": "user", "content": QUESTION}], "tools": [tool], **limits}


def of_message(message: Json) -> Said:
    blocks, usage = message["content"], message["usage"]
    cached = usage["cache_read_input_tokens"]
    return Said(
        text="".join(block.get("text", "") for block in blocks),
        reasoning="".join(block.get("thinking", "") for block in blocks),
        calls=[(block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"],
        num_tokens=(usage["input_tokens"] + cached, cached, usage["output_tokens"]),
        reason=message["stop_reason"],
    )


async def messages(_router: RunningRouter, http: httpx.AsyncClient, asked: Asked) -> Said:
    return of_message(await post(http, "/v1/messages", messages_body(asked)))


async def messages_stream(_router: RunningRouter, http: httpx.AsyncClient, asked: Asked) -> Said:
    message: Json = {}
    arguments: dict[int, str] = {}
    for event in await events(http, "/v1/messages", messages_body(asked)):
        if event["type"] == "message_start":
            message = event["message"]
        elif event["type"] == "content_block_start":
            message["content"].append(event["content_block"])
        elif event["type"] == "content_block_delta":
            block, delta = message["content"][event["index"]], event["delta"]
            if delta["type"] == "input_json_delta":
                arguments[event["index"]] = arguments.get(event["index"], "") + delta["partial_json"]
            else:
                name = delta["type"].removesuffix("_delta")
                block[name] += delta[name]
        elif event["type"] == "message_delta":
            message = {**message, **event["delta"], "usage": event["usage"]}
    for index, text in arguments.items():
        message["content"][index]["input"] = json.loads(text)
    return of_message(message)


async def grpc_chat(router: RunningRouter, _http: httpx.AsyncClient, asked: Asked) -> Said:
    request = inference_pb2.ChatRequest(
        messages=[inference_pb2.ChatMessage(**message) for message in CHAT["messages"]],
        tools=[inference_pb2.Tool(name=NAME, description=DESCRIPTION, parameters=json.dumps(SCHEMA))],
        sampling_params=types_pb2.SamplingParams(max_tokens=asked.max_tokens, stop=asked.stop),
    )
    said, names, arguments = Said(), dict[int, str](), dict[int, str]()
    async for response in router.inference.Chat(request):
        said.text += response.text
        said.reasoning += response.reasoning
        for call in response.tool_calls:
            names[call.index] = names.get(call.index) or call.name
            arguments[call.index] = arguments.get(call.index, "") + call.arguments
        if response.finish_reason:
            usage = response.usage
            said.reason = response.finish_reason
            said.num_tokens = (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
    said.calls = [(names[index], json.loads(arguments[index])) for index in names]
    return said


Door = Callable[[RunningRouter, httpx.AsyncClient, Asked], Awaitable[Said]]
DOORS: tuple[tuple[Door, int], ...] = (
    (chat, 0),
    (chat_stream, 0),
    (responses, 1),
    (responses_stream, 1),
    (messages, 2),
    (messages_stream, 2),
    (grpc_chat, 3),
)
"""Each with its word in `REASONS`."""


@each_case(
    ("answer", "asked", "text", "reasoning", "calls", "end"),
    [
        (ANSWER, Asked(), ANSWER, "", [], "end"),
        (ANSWER, Asked(stop=["Paris"]), "The capital of France is ", "", [], "stop text"),
        (ANSWER, Asked(max_tokens=4), None, "", [], "limit"),
        ("<think>hm</think>naïve 東京 😀", Asked(), "naïve 東京 😀", "hm", [], "end"),
        (TWO_CALLS, Asked(), "Yes.", "hm", [(NAME, {"x": 1}), (NAME, {"x": 2})], "calls"),
        (TWO_CALLS, Asked(max_tokens=len(ids_of("<think>hm"))), "", "hm", [], "limit"),
    ],
)
async def test_the_same_question_has_the_same_answer(
    router: RunningRouter,
    worker: FakeWorker,
    http: httpx.AsyncClient,
    answer: str,
    asked: Asked,
    text: str | None,
    reasoning: str,
    calls: list[tuple[str, Json]],
    end: str,
) -> None:
    """`text` is None if it is cut, wherever."""
    worker.answer = ids_of(answer)
    told = [(await door(router, http, asked), REASONS[end][word]) for door, word in DOORS]
    first = told[0][0]
    assert (first.text, first.reasoning, first.calls) == (first.text if text is None else text, reasoning, calls)
    assert answer.startswith(first.text) or text is not None
    for said, reason in told:
        assert (said.text, said.reasoning, said.calls) == (first.text, first.reasoning, first.calls)
        assert said.num_tokens == first.num_tokens
        assert said.reason == reason
    prompts = [list(request.prompt_token_ids) for request in worker.requests]
    assert prompts == [prompts[0]] * len(DOORS)


PromptDoor = Callable[[RunningRouter, httpx.AsyncClient, Json], Awaitable[tuple[object, ...]]]


async def completions(_router: RunningRouter, http: httpx.AsyncClient, limits: Json) -> tuple[object, ...]:
    answer = await post(http, "/v1/completions", {"prompt": QUESTION, **limits})
    (choice,), usage = answer["choices"], answer["usage"]
    return choice["text"], choice["finish_reason"], usage["prompt_tokens"], usage["completion_tokens"]


async def generate(router: RunningRouter, _http: httpx.AsyncClient, limits: Json) -> tuple[object, ...]:
    params = types_pb2.SamplingParams(**limits)
    request = inference_pb2.GenerateRequest(prompt=QUESTION, sampling_params=params)
    told = [response async for response in router.inference.Generate(request)]
    last = told[-1]
    reason = next(words[0] for words in REASONS.values() if words[3] == last.finish_reason)
    text = "".join(one.text for one in told)
    return text, reason, last.usage.prompt_tokens, last.usage.completion_tokens


async def open_inference(_router: RunningRouter, http: httpx.AsyncClient, limits: Json) -> tuple[object, ...]:
    parameters = {"exclude_input_in_output": True, **limits}
    asks = dict.fromkeys(("return_finish_reason", "return_num_input_tokens", "return_num_output_tokens"), True)
    body = {"text_input": QUESTION, "parameters": parameters, **asks}
    told = await post(http, "/v2/models/tiny/generate", body)
    return told["text_output"], told["finish_reason"], told["num_input_tokens"], told["num_output_tokens"]


@each_case("limits", [{"max_tokens": 200}, {"max_tokens": 4}, {"max_tokens": 200, "stop": ["Paris"]}])
async def test_the_same_prompt_has_the_same_answer(
    router: RunningRouter, worker: FakeWorker, http: httpx.AsyncClient, limits: Json
) -> None:
    worker.answer = ids_of(ANSWER)
    doors: tuple[PromptDoor, ...] = (completions, generate, open_inference)
    first, *others = [await door(router, http, limits) for door in doors]
    assert others == [first] * len(others)
    assert ANSWER.startswith(str(first[0]))
    prompts = [list(request.prompt_token_ids) for request in worker.requests]
    assert prompts == [prompts[0]] * len(doors)


@each_case(
    ("path", "body"),
    [
        ("/v1/chat/completions", chat_body(Asked())),
        ("/v1/completions", {"prompt": QUESTION}),
        ("/v1/responses", responses_body(Asked())),
        ("/v1/messages", messages_body(Asked())),
    ],
)
async def test_headers_mean_the_same(http: httpx.AsyncClient, worker: FakeWorker, path: str, body: Json) -> None:
    headers = {"x-request-id": "mine", "x-llm-d-slo-ttft-ms": "1234", "x-baton-explain": "true"}
    for stream in (False, True):
        answer = await http.post(path, json={**body, "stream": stream}, headers=headers)
        assert (answer.status_code, answer.headers["x-request-id"]) == (200, "mine"), answer.text
        assert '"routing":[' in answer.text
    assert [request.targets.ttft_ms for request in worker.requests] == [1234, 1234]
    wrong = await http.post(path, json=body, headers={"x-llm-d-slo-ttft-ms": "soon"})
    assert (wrong.status_code, "x-llm-d-slo-ttft-ms: " in wrong.text) == (400, True)
