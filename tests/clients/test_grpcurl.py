"""grpcurl, which knows of Baton what reflection tells: conversations, tools, forms, several answers, embeddings."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest

from tests.integration import stock_tools
from tests.integration.stack import Stack

ASK = {"role": "user", "content": "What is the capital of Japan?"}
WEATHER = {
    "type": "object",
    "properties": {"unit": {"enum": ["C", "F"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["unit", "days"],
    "additionalProperties": False,
}
AT_ONCE = {"chat_template_kwargs": json.dumps({"enable_thinking": False})}  # reasoning before a form may be long
TOOLS = [{"name": "weather", "description": "The weather in a city", "parameters": json.dumps(WEATHER)}]

Call = Callable[[str, dict[str, Any]], list[dict[str, Any]]]


@pytest.fixture
def call(request: pytest.FixtureRequest) -> Call:
    stock_tools.tool("grpcurl")  # or skips, before a stack is started
    stack: Stack = request.getfixturevalue("stack")
    return lambda method, asked: stock_tools.grpcurl(stack.grpc, f"baton.v1.InferenceService/{method}", asked)


def text_of(messages: list[dict[str, Any]]) -> str:
    return "".join(message.get("text", "") for message in messages)


def test_chat(call: Call) -> None:
    messages = call("Chat", {"messages": [ASK], "sampling_params": {"temperature": 0, "max_tokens": 12}})
    assert "Tokyo" in text_of(messages)
    assert messages[-1]["finish_reason"] == "FINISH_REASON_STOP"
    assert 1 <= messages[-1]["usage"]["completion_tokens"] <= 12


@pytest.mark.parametrize("choice", [{"mode": "MODE_REQUIRED"}, {"name": "weather"}])
def test_a_tool_is_called_and_its_result_sent_back(call: Call, choice: dict[str, str]) -> None:
    asked = {"messages": [ASK], "tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False, **AT_ONCE}
    messages = call("Chat", {**asked, "sampling_params": {"max_tokens": 64}})
    assert messages[-1]["finish_reason"] == "FINISH_REASON_TOOL_CALLS"
    deltas = [delta for message in messages for delta in message.get("tool_calls", ())]
    made = {"id": deltas[0]["id"], "name": "weather", "arguments": "".join(d.get("arguments", "") for d in deltas)}
    assert deltas[0]["name"] == "weather"
    arguments = json.loads(made["arguments"])
    assert arguments["unit"] in ("C", "F")
    assert 1 <= arguments["days"] <= 9
    results = [
        {"role": "assistant", "tool_calls": [made]},
        {"role": "tool", "tool_call_id": made["id"], "content": "sunny"},
    ]
    again = call("Chat", {"messages": [ASK, *results], "tools": TOOLS, "sampling_params": {"max_tokens": 4}})
    assert 1 <= again[-1]["usage"]["completion_tokens"] <= 4


@pytest.mark.parametrize(
    ("guided", "is_right"),
    [
        ({"choice": ["red", "green"]}, lambda text: text in ("red", "green")),
        ({"regex": "[0-9]{3}-[0-9]{2}"}, lambda text: len(text) == 6 and text[3] == "-"),
        ({"json_schema": json.dumps(WEATHER)}, lambda text: json.loads(text)["unit"] in ("C", "F")),
    ],
)
def test_guided_text(call: Call, guided: dict[str, Any], is_right: Callable[[str], bool]) -> None:
    sampling = {"max_tokens": 64, "guided": guided}
    for method, prompt in (("Generate", {"prompt": "Say"}), ("Chat", {"messages": [ASK], **AT_ONCE})):
        messages = call(method, {**prompt, "sampling_params": sampling})
        assert is_right(text_of(messages)), messages
        assert messages[-1]["finish_reason"] == "FINISH_REASON_STOP"


def test_several_answers(call: Call) -> None:
    sampling = {"max_tokens": 6, "seed": 5, "temperature": 1, "ignore_eos": True}
    for method, prompt in (("Generate", {"prompt": "Once upon"}), ("Chat", {"messages": [ASK]})):
        messages = call(method, {**prompt, "sampling_params": sampling, "choices": {"n": 3}})
        answers = [[one for one in messages if one.get("index", 0) == index] for index in range(3)]
        assert sum(map(len, answers)) == len(messages)
        assert [sum(len(one.get("token_ids", ())) for one in answer) for answer in answers] == [6, 6, 6]
        assert {answer[-1]["finish_reason"] for answer in answers} == {"FINISH_REASON_LENGTH"}
        assert len({text_of(answer) for answer in answers}) > 1


def test_embeddings(call: Call) -> None:
    inputs = [{"text": "a cat"}, {"text": "tax law"}, {"text": "a cat"}]
    (answer,) = call("Embed", {"inputs": inputs})
    cat, law, again = ([float(value) for value in one["values"]] for one in answer["embeddings"])
    assert all(abs(math.hypot(*vector) - 1) < 1e-4 for vector in (cat, law))
    assert math.dist(cat, again) < 1e-3 < math.dist(cat, law)
    (short,) = call("Embed", {"inputs": inputs[:1], "dimensions": 64, "pooling": "POOLING_MEAN", "normalize": False})
    assert len(short["embeddings"][0]["values"]) == 64
