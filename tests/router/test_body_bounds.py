"""What a body may make the event loop do: what it holds is counted before it is looked at, and looked at once."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import msgspec
import pytest

from common.choices import Choices
from common.errors import InvalidArgumentError
from common.sampling import MAX_BANNED_SEQUENCES, MAX_BANNED_TOKENS, checked
from common.validation import ModelLimits
from protos.baton.v1 import inference_pb2, types_pb2
from protos.messages import message_of
from router.api import grpc_chat
from router.api.rest.openai import chat_messages, guided, responses_input
from router.api.rest.openai.generation_bodies import ChatBody
from router.api.rest.openai.guided import MAX_SCHEMA_BYTES
from router.api.rest.openai.parsing import parse
from router.api.rest.openai.responses_body import ResponsesBody
from router.fleet.served_model import ServedModel
from router.preparing import preparation as preparing
from router.preparing.preparation import Preparation
from router.preparing.sampling_size import check_size
from router.running import request as asking
from router.running.request import GenerationRequest, Prompt
from router.running.threads import SHORT, TextThreads
from tests.router.tiny_tokenizer import tiny_tokenizer, vocab_size
from text.conversation import MAX_CALLS, MAX_PARTS, MAX_TOOLS, MAX_VALUES, Conversation, Tool, make_tools

Json = dict[str, Any]
ResultT = TypeVar("ResultT")

LIMITS = ModelLimits(model="tiny", max_model_len=131_072, vocab_size=vocab_size(), max_token_bytes=8)
USER = {"role": "user", "content": "x"}
MANY = {"x": [1] * MAX_VALUES}
"""Two values more than may be, and not a text among them."""
ENOUGH = {"x": [1] * (MAX_VALUES - 3)}  # with the call itself
MODEL = ServedModel(LIMITS, "f", "", "float32", frozenset(), tiny_tokenizer(), 16)


class Untouched(list[object]):
    """A list that nobody may look into."""

    def __iter__(self) -> Iterator[object]:
        raise AssertionError("its entries are looked at")


def called(arguments: Json, number: int = 0) -> Json:
    function = {"name": "f", "arguments": json.dumps(arguments)}
    return {"id": f"c{number}", "type": "function", "function": function}


def calling(*arguments: Json) -> Json:
    return {"role": "assistant", "tool_calls": [called(one, number) for number, one in enumerate(arguments)]}


def tool(parameters: Json, name: str = "f") -> Json:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def of_chat(**fields: object) -> Conversation:
    return parse(ChatBody, json.dumps({"messages": [USER], **fields}).encode()).conversation(LIMITS)


def of_responses(**fields: object) -> Conversation:
    return parse(ResponsesBody, json.dumps({"input": "x", **fields}).encode()).response_conversation(LIMITS)


def of_grpc(**fields: Any) -> Conversation:
    message = inference_pb2.ChatMessage(role="user", content="x")
    return grpc_chat.conversation(inference_pb2.ChatRequest(messages=[message], **fields))


def grpc_call(arguments: Json) -> inference_pb2.ToolCall:
    return inference_pb2.ToolCall(id="c", name="f", arguments=json.dumps(arguments))


def call_item(arguments: Json) -> Json:
    return {"type": "function_call", "call_id": "c", "name": "f", "arguments": json.dumps(arguments)}


HALVES = [{"x": [1] * (MAX_VALUES // 2)}] * 2


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: of_chat(messages=[calling(MANY)]), "messages[0].tool_calls[0].function.arguments"),
        (lambda: of_chat(messages=[calling(*HALVES)]), "messages[0].tool_calls[1].function.arguments"),
        (lambda: of_chat(messages=[calling(HALVES[0])] * 2), "messages[1].tool_calls[0].function.arguments"),
        (lambda: of_chat(messages=[calling(*[{}] * MAX_CALLS)] * 200), "messages[128].tool_calls"),
        (lambda: of_chat(tools=[tool(MANY)]), "tools[0].function.parameters"),
        (lambda: of_chat(tools=[tool(one, f"f{n}") for n, one in enumerate(HALVES)]), "tools[1].function.parameters"),
        (lambda: of_chat(chat_template_kwargs=MANY), "chat_template_kwargs"),
        (lambda: of_responses(input=[call_item(MANY)]), "input[0].arguments"),
        (lambda: of_responses(input=[call_item(HALVES[0])] * 2), "input[1].arguments"),
        (lambda: of_responses(tools=[{"type": "function", "name": "f", "parameters": MANY}]), "tools[0].parameters"),
        (lambda: of_responses(chat_template_kwargs=MANY), "chat_template_kwargs"),
        (
            lambda: of_grpc(tools=[inference_pb2.Tool(name="f", parameters=json.dumps(MANY))]),
            "tools[0].parameters",
        ),
        (lambda: of_grpc(chat_template_kwargs=json.dumps(MANY)), "chat_template_kwargs"),
    ],
)
def test_values_are_bounded(make: Callable[[], Conversation], field: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"more than {MAX_VALUES} values") as caught:
        make()
    assert caught.value.field == field


def test_values_are_bounded_over_grpc() -> None:
    message = inference_pb2.ChatMessage(role="assistant", tool_calls=[grpc_call(HALVES[0])])
    with pytest.raises(InvalidArgumentError, match="values") as caught:
        grpc_chat.conversation(inference_pb2.ChatRequest(messages=[message] * 2))
    assert caught.value.field == "messages[1].tool_calls[0].function.arguments"
    crowd = inference_pb2.ChatMessage(role="assistant", tool_calls=[grpc_call({})] * (MAX_VALUES + 1))
    with pytest.raises(InvalidArgumentError, match="at most 128 entries"):  # before any call is taken
        grpc_chat.conversation(inference_pb2.ChatRequest(messages=[crowd]))
    full = inference_pb2.ChatMessage(role="assistant", tool_calls=[grpc_call({})] * 128)
    grpc_chat.conversation(inference_pb2.ChatRequest(messages=[full] * 70))  # each call counts once


def test_as_many_values_as_there_may_be() -> None:
    made = of_chat(messages=[calling(ENOUGH)], tools=[tool(ENOUGH)], chat_template_kwargs=ENOUGH)
    assert made.messages[0]["tool_calls"][0]["function"]["arguments"] == ENOUGH


def test_large_schemas_of_all_tools_pass() -> None:
    """128 tools with eight parameters each, described as servers of tools describe theirs."""
    one = {"type": "string", "description": "what it is for", "enum": ["a", "b", "c", "d"]}
    properties = {f"parameter_{n}": one for n in range(7)}
    parameters = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    tools = [Tool(name=f"tool_{n}", parameters=parameters) for n in range(MAX_TOOLS)]
    assert len(make_tools(tools, "tools").tools) == MAX_TOOLS


def test_a_list_that_is_too_long_is_not_looked_at() -> None:
    tools = [Tool(name="f", parameters={"x": Untouched([1] * MAX_VALUES)})]
    with pytest.raises(InvalidArgumentError, match="values"):
        make_tools(tools, "tools")


async def test_values_without_text_are_work_for_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop renders what is small alone."""
    sizes = []

    async def run(_: TextThreads, size: int, work: Callable[[], ResultT], *__: object) -> ResultT:
        sizes.append(size)
        return work()

    monkeypatch.setattr(TextThreads, "run", run)
    threads = TextThreads(1)
    preparation = Preparation(request_timeout_s=60, control_tokens=False, threads=threads, generic_tools=False)
    for arguments in ({}, {"x": [1] * 1000}):
        await preparation.chat_prompt(MODEL, of_chat(messages=[USER, calling(arguments)]))
    threads.close()
    assert sizes[0] <= SHORT < sizes[1]


@pytest.mark.parametrize(
    ("make", "field", "module"),
    [
        (lambda: of_chat(messages=[USER] * 5000), "messages", chat_messages),
        (
            lambda: of_chat(messages=[{**USER, "content": [{"type": "text", "text": ""}] * 100}] * 100),
            "messages",
            chat_messages,
        ),
        (lambda: of_responses(input=[USER] * 5000), "input", responses_input),
        (
            lambda: of_responses(input=[{**USER, "content": [{"type": "text", "text": ""}] * 100}] * 100),
            "input",
            responses_input,
        ),
    ],
)
def test_messages_are_counted_before_they_are_made(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], Conversation], field: str, module: object
) -> None:
    def none(*_: object, **__: object) -> Json:
        raise AssertionError("a message was made")

    monkeypatch.setattr(module, "make_message", none)
    with pytest.raises(InvalidArgumentError, match=f"at most {MAX_PARTS} ") as caught:
        make()
    assert caught.value.field == field


def test_tools_are_counted_before_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    crowd = [{"type": "wrong"}] * (MAX_TOOLS + 1)  # the first would be refused for what it is
    for make in (of_chat, of_responses):
        with pytest.raises(InvalidArgumentError, match=f"at most {MAX_TOOLS} entries") as caught:
            make(tools=crowd)
        assert caught.value.field == "tools"
    with pytest.raises(InvalidArgumentError, match=f"at most {MAX_TOOLS} entries"):
        of_grpc(tools=[inference_pb2.Tool(parameters="{")] * (MAX_TOOLS + 1))


SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}
LONG = {"enum": [1] * MAX_SCHEMA_BYTES}
FORMS: list[tuple[type[ChatBody] | type[ResponsesBody], Callable[[object], Json], str]] = [
    (
        ChatBody,
        lambda schema: {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}},
        "response_format.json_schema.schema",
    ),
    (ChatBody, lambda schema: {"guided": {"json_schema": schema}}, "guided.json_schema"),
    (ChatBody, lambda schema: {"structured_outputs": {"json": schema}}, "structured_outputs.json"),
    (ChatBody, lambda schema: {"guided_json": schema}, "guided_json"),
    (
        ResponsesBody,
        lambda schema: {"text": {"format": {"type": "json_schema", "name": "x", "schema": schema}}},
        "text.format.schema",
    ),
]


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes each schema had that was decoded."""
    sizes: list[int] = []

    class Json:
        @staticmethod
        def decode(given: msgspec.Raw) -> object:
            sizes.append(memoryview(given).nbytes)
            return msgspec.json.decode(given)

    class Msgspec:
        json = Json
        DecodeError = msgspec.DecodeError

    monkeypatch.setattr(guided, "msgspec", Msgspec)
    return sizes


def body_of(kind: type[ChatBody] | type[ResponsesBody], fields: Json) -> ChatBody | ResponsesBody:
    given = {"messages": [USER]} if kind is ChatBody else {"input": "x"}
    return parse(kind, json.dumps({**given, **fields}).encode())


@pytest.mark.parametrize(("kind", "fields", "field"), FORMS)
def test_schemas_that_are_too_long_are_not_decoded(
    decoded: list[int], kind: type[ChatBody], fields: Callable[[object], Json], field: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=f"at most {MAX_SCHEMA_BYTES} bytes") as caught:
        body_of(kind, fields(LONG)).check()
    assert caught.value.field == field
    assert not decoded


@pytest.mark.parametrize(("kind", "fields", "field"), FORMS)
def test_schemas_are_decoded_once(
    decoded: list[int], kind: type[ChatBody], fields: Callable[[object], Json], field: str
) -> None:
    body = body_of(kind, fields(SCHEMA))
    body.check()
    assert body.sampling()["guided"]
    assert field.startswith(body.field_name("guided"))
    assert decoded == [len(json.dumps(SCHEMA))]


@pytest.fixture
def num_calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often what costs much for long lists was called."""
    found = Counter[str]()

    def counted(name: str, function: Callable[..., ResultT]) -> Callable[..., ResultT]:
        def call(*args: object, **kwargs: object) -> ResultT:
            found[name] += 1
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(preparing, "checked", counted("checked", checked))
    monkeypatch.setattr(preparing, "check_size", counted("check_size", check_size))
    monkeypatch.setattr(asking, "message_of", counted("message_of", message_of))
    return found


def asked(sampling: Json, num_prompts: int) -> list[GenerationRequest]:
    threads = TextThreads(1)
    preparation = Preparation(request_timeout_s=60, control_tokens=False, threads=threads)
    prompts = [Prompt([5] * (1 + number), "prompt") for number in range(num_prompts)]
    choices = Choices(n=2)
    made = preparation.requests(MODEL, prompts, sampling, arrived_at=0.0, choices=choices)
    threads.close()
    return made


def test_long_lists_are_checked_and_converted_once_for_all_answers_to_a_body(num_calls: Counter[str]) -> None:
    banned = [{"token_ids": [number % 200, *[7] * (MAX_BANNED_TOKENS - 1)]} for number in range(MAX_BANNED_SEQUENCES)]
    requests = asked({"bad_words_ids": banned}, 64)
    messages = [one.sampling_messages.of(one.sampling_params) for one in requests]
    assert num_calls == {"checked": 1, "check_size": 1, "message_of": 1}
    assert len({message.seed for message in messages}) == len(requests) == 128
    assert messages == [message_of(one.sampling_params, types_pb2.SamplingParams) for one in requests]


@pytest.mark.parametrize("sampling", [{}, {"prompt_logprobs": 2, "bad_words": ["no"]}, {"temperature": 0, "seed": 3}])
def test_each_prompt_has_its_own_room(sampling: Json) -> None:
    first, _, last, _ = asked(sampling, 2)
    assert first.sampling_params.max_tokens == last.sampling_params.max_tokens + 1
    for one in (first, last, first):
        message = one.sampling_messages.of(one.sampling_params)
        assert message == message_of(one.sampling_params, types_pb2.SamplingParams)
