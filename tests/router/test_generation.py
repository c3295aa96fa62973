"""One answer, as its tokens come: how many of them come together makes no difference to it."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.choices import Choices
from common.sampling import SamplingParams
from common.types import FinishReason, SampledToken
from router.api.rest.openai.answer import CompletionAnswer
from router.api.rest.openai.formats import ChatFormat
from router.api.rest.openai.large_json import json_parts
from router.api.rest.openai.responses import ResponseAnswer
from router.api.rest.openai.tools import JsonObject
from router.fleet.registry import Registry
from router.limits.admission import Admission
from router.limits.demand import Demand
from router.limits.gate import Gate
from router.running.request import GenerationRequest, NewTokens, Output, Progress
from router.serving.generation import Generation
from tests.examples import examples
from tests.router import chat_templates
from tests.router.test_answer import keep, requests
from tests.router.tiny_tokenizer import byte_ids, eos_id, tiny_tokenizer
from text.answer_parser import ModelAnswers
from text.conversation import Tool, Tools
from text.response_templates import response_template

F = Tool(name="f", description="", parameters={"type": "object", "properties": {"x": {"type": "integer"}}})
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": %d}}\n</tool_call>'
ANSWER = f"<think>hm</think>\n\nYes 😀.\n{CALL % 1}\n{CALL % 2}"
TOKEN_IDS = [*byte_ids(ANSWER), eos_id()]


class FakeDispatcher:
    """Gives `pieces` of one answer."""

    def __init__(self, pieces: Sequence[NewTokens]) -> None:
        self._pieces = pieces

    async def run(self, request: GenerationRequest, progress: Progress) -> AsyncGenerator[NewTokens, None]:
        for piece in self._pieces:
            yield piece


def request(*, parallel: bool = True, **params: Any) -> GenerationRequest:
    template = response_template(None, chat_templates.HERMES)
    assert template is not None
    reading = ModelAnswers(template, tiny_tokenizer().rust).reading("", Tools(tools=(F,), parallel=parallel))
    return replace(requests(1)[0], reading=reading, sampling_params=SamplingParams(**params))


def pieces(cuts: Sequence[int], *, with_logprobs: bool) -> list[NewTokens]:
    """All tokens, cut at `cuts`."""
    tokens = [SampledToken(token_id, logprob=-0.5 if with_logprobs else None) for token_id in TOKEN_IDS]
    starts = [0, *sorted(set(cuts))]
    ends = [*starts[1:], len(tokens)]
    news = [NewTokens(tokens[start:end]) for start, end in zip(starts, ends, strict=True)]
    news[-1].finish_reason, news[-1].stop_token_id = FinishReason.STOP, eos_id()
    return news


@dataclass
class Answered:
    """One answer to the end, by each interface."""

    outputs: list[Output]
    chat: Any
    response: Any

    @property
    def all(self) -> object:
        """What must not depend on how tokens come."""
        last = self.outputs[-1]
        calls = [call for output in self.outputs for call in output.tool_calls]
        return (
            "".join(output.text for output in self.outputs),
            "".join(output.reasoning for output in self.outputs),
            [call.name for call in calls if call.name],
            ["".join(call.arguments for call in calls if call.index == index) for index in range(2)],
            [token for output in self.outputs for token in output.tokens],
            (last.finish_reason, last.stop_reason, last.usage and last.usage.completion_tokens),
            (sum(output.num_reasoning_tokens for output in self.outputs), last.usage and last.usage.reasoning_tokens),
            (self.chat["choices"], self.chat["usage"]),
            (self.response["output"], self.response["usage"]),
        )


async def answered(asked: GenerationRequest, cuts: Sequence[int]) -> Answered:
    has_logprobs = asked.sampling_params.logprobs is not None
    news = pieces(cuts, with_logprobs=has_logprobs)
    generation = Generation(FakeDispatcher(news), Admission(Registry([], []), Demand(), Gate()))  # type: ignore[arg-type]
    chat = CompletionAnswer(
        generation,
        [asked],
        ChatFormat(),
        request_id="r",
        choices=Choices(),
        wants_logprobs=has_logprobs,
        wants_usage_chunk=False,
        hold=keep,
    )
    response = ResponseAnswer(generation, asked, "r", {}, wants_logprobs=has_logprobs, hold=keep)
    return Answered(
        [output async for _, output in generation.generate(asked)],
        as_sent(await chat.whole()),
        as_sent(await response.whole()),
    )


def as_sent(whole: JsonObject) -> Any:
    return json.loads(b"".join(json_parts(whole)))


@pytest.fixture(autouse=True)
def equal_call_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("text.answer_parser.new_call_id", lambda: "c")


CASES = [
    {},
    {"parallel": False},
    {"logprobs": 0},
    {"logprobs": 0, "parallel": False},
    {"stop": ("\n</tool",)},
    {"stop": ("es",)},
]


@pytest.mark.parametrize("case", CASES)
@settings(max_examples=examples(15), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cuts=st.lists(st.integers(1, len(TOKEN_IDS) - 1), max_size=12))
async def test_how_many_tokens_come_together_makes_no_difference(case: dict[str, Any], cuts: list[int]) -> None:
    asked = request(**case)
    one_by_one = await answered(asked, range(1, len(TOKEN_IDS)))
    assert (await answered(asked, cuts)).all == one_by_one.all


@pytest.mark.parametrize("cuts", [range(1, len(TOKEN_IDS)), ()])
async def test_tokens_of_reasoning_are_counted_alone(cuts: Sequence[int]) -> None:
    given = await answered(request(), cuts)
    assert given.chat["usage"]["completion_tokens"] == len(TOKEN_IDS)
    assert given.chat["usage"]["completion_tokens_details"] == {"reasoning_tokens": len(byte_ids("hm"))}
    assert given.response["usage"]["output_tokens_details"] == {"reasoning_tokens": len(byte_ids("hm"))}


@pytest.mark.parametrize("cuts", [range(1, len(TOKEN_IDS)), ()])
async def test_what_comes_with_the_only_call_and_after_it_is_no_part_of_the_answer(cuts: Sequence[int]) -> None:
    given = await answered(request(parallel=False), cuts)
    whole = byte_ids(ANSWER[: ANSWER.index(CALL % 2)])  # the character after a call shows that it is whole
    assert [token.token_id for output in given.outputs for token in output.tokens] == whole
    assert given.chat["usage"]["completion_tokens"] == len(whole)
    assert given.outputs[-1].finish_reason is FinishReason.TOOL_CALLS


async def test_what_comes_together_is_told_together() -> None:
    """A chunk for each token is work for all who take it. Only tokens with logprobs are told one by one: each belongs
    to a part."""
    assert len((await answered(request(), [10])).outputs) == 2
    calls = (await answered(request(), ())).outputs[0].tool_calls
    assert [(call.name, call.arguments) for call in calls] == [("f", '{"x": 1}'), ("f", '{"x": 2}')]
    assert len((await answered(request(logprobs=0), ())).outputs) == len(TOKEN_IDS)
