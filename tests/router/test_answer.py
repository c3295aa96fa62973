"""Answers of several choices: bounded before they begin, no further ahead than their reader, formatted as they come."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

import grpc
import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.choices import Choices
from common.errors import OverloadedError, UnavailableError
from common.sampling import SamplingParams
from common.types import FinishReason, SampledToken, TokenLogprob
from common.validation import ModelLimits
from protos.baton.v1 import inference_pb2, types_pb2
from router.api.rest.openai.answer import CompletionAnswer
from router.api.rest.openai.formats import AnswerFormat, ChatFormat, CompletionFormat, JsonObject
from router.api.rest.openai.large_json import json_parts
from router.fleet.served_model import ServedModel
from router.running.request import GenerationRequest, Output
from router.serving.choices import MAX_AHEAD, side_by_side
from router.serving.generation import Generation
from tests.router.conftest import StartRouter
from tests.router.tiny_tokenizer import ids_of, tiny_tokenizer, vocab_size
from tests.support.fake_worker import FakeWorker
from text.answer_parts import ToolCallDelta
from text.text_offsets import TextOffsets
from text.tokenizer import Tokenizer

LIMITS = ModelLimits(model="tiny", max_model_len=256, vocab_size=vocab_size(), max_token_bytes=8)
REPORT, USAGE = types_pb2.RequestReport(), types_pb2.Usage(prompt_tokens=1, completion_tokens=1)


class FakeGeneration:
    """Gives out `outputs` for each request, or goes on for ever; knows who runs, and how far it came."""

    def __init__(self, outputs: Sequence[Output] = ()) -> None:
        self._outputs = outputs
        self.num_given = 0
        self.running: set[str] = set()
        self.fails: str = ""  # id of the request that fails at once

    outputs = Generation.outputs

    async def generate(self, request: GenerationRequest, index: int = 0) -> AsyncGenerator[tuple[int, Output], None]:
        self.running.add(request.request_id)
        try:
            if request.request_id == self.fails:
                raise UnavailableError("gone")
            for output in self._outputs:
                yield index, output
            while not self._outputs:
                await asyncio.sleep(0)  # as anything that comes over a network
                self.num_given += 1
                yield index, Output(text="x", tokens=[])
        finally:
            self.running.discard(request.request_id)


def requests(num: int) -> list[GenerationRequest]:
    model = ServedModel(LIMITS, "f", "", "float32", frozenset(), tiny_tokenizer(), 16)
    return [
        GenerationRequest(
            request_id=str(number),
            model=model,
            prompt_token_ids=[1],
            sampling_params=SamplingParams(),
            arrived_at=0.0,
            deadline=1e9,
        )
        for number in range(num)
    ]


def keep(_num_bytes: int) -> None:
    """There is room for everything."""


async def turns(num: int) -> None:
    for _ in range(num):
        await asyncio.sleep(0)


async def test_a_slow_reader_holds_up_its_own_choices() -> None:
    generation = FakeGeneration()
    async with aclosing(side_by_side(generation, requests(8), keep)) as outputs:  # type: ignore[arg-type]
        for _ in range(3):
            await anext(outputs)
            await turns(200)
        assert generation.num_given <= 3 + MAX_AHEAD + 8  # what was read, what waits, one in each hand
        assert len(generation.running) == 8
    assert not generation.running


async def test_readers_that_leave_while_all_wait_end_all_of_them() -> None:
    generation = FakeGeneration()

    async def read() -> None:
        async with aclosing(side_by_side(generation, requests(40), keep)) as outputs:  # type: ignore[arg-type]
            await anext(outputs)
            await asyncio.Event().wait()

    reading = asyncio.create_task(read())
    await turns(300)
    assert len(generation.running) == 40
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert not generation.running


async def test_the_first_failure_ends_all_of_them() -> None:
    generation = FakeGeneration()
    generation.fails = "30"

    async def read() -> None:
        async with aclosing(side_by_side(generation, requests(40), keep)) as outputs:  # type: ignore[arg-type]
            async for _ in outputs:
                pass

    with pytest.raises(UnavailableError):
        await asyncio.wait_for(read(), 60)
    assert not generation.running


@pytest.mark.parametrize("num", [1, 3])
async def test_prompt_logprobs_are_held_only_for_further_answers(num: int) -> None:
    (request,) = requests(1)
    request = replace(request, prompt_token_ids=[1] * 5, sampling_params=SamplingParams(prompt_logprobs=1))
    pieces = [Output(text="", tokens=[], prompt_logprobs=sampled("ab")) for _ in range(2)]
    generation = FakeGeneration([*pieces, Output(text="x", tokens=sampled("x"), finish_reason=FinishReason.STOP)])
    answers, held = [request.numbered(one, is_first=one == 0) for one in range(num)], list[int]()
    outputs = side_by_side(generation, answers, held.append)  # type: ignore[arg-type]
    scored = Counter([index async for index, output in outputs if output.prompt_logprobs])
    assert scored[0] == 2
    assert held == ([piece.num_kept_bytes for piece in pieces] if num > 1 else [])

    def refuse(_num_bytes: int) -> None:
        raise OverloadedError("the router holds too much", 1.0)

    if num > 1:
        with pytest.raises(OverloadedError):
            _ = [output async for output in side_by_side(generation, answers, refuse)]  # type: ignore[arg-type]


def sampled(text: str) -> list[SampledToken]:
    return [SampledToken(i, -0.5, (TokenLogprob(i, -0.5), TokenLogprob(i + 1, -1.5))) for i in ids_of(text)]


@pytest.mark.parametrize("answer_format", [ChatFormat(), CompletionFormat()])
async def test_whole_answers_are_formatted_as_they_come(
    answer_format: AnswerFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few tokens at a time, and the same comes of it as of all of them at once."""
    text = "The capital of France is Paris. How are you?"
    tokens = sampled(text)
    outputs = [Output(text="", tokens=tokens[at : at + 2]) for at in range(0, len(tokens), 2)]
    end = Output(text=text, tokens=[], finish_reason=FinishReason.STOP, report=REPORT, usage=USAGE)
    wanted = answer_format.logprobs(tokens, tiny_tokenizer(), TextOffsets())
    sizes: list[int] = []
    original = type(answer_format).logprobs

    def counted(
        self: AnswerFormat, tokens: Sequence[SampledToken], tokenizer: Tokenizer, offset: TextOffsets
    ) -> JsonObject:
        sizes.append(len(tokens))
        return original(self, tokens, tokenizer, offset)

    monkeypatch.setattr(type(answer_format), "logprobs", counted)
    answer = CompletionAnswer(
        FakeGeneration([*outputs, end]),  # type: ignore[arg-type]
        requests(3),
        answer_format,
        request_id="r",
        choices=Choices(n=3),
        wants_logprobs=True,
        wants_usage_chunk=False,
        hold=keep,
    )
    whole = msgspec.json.decode(b"".join(json_parts(await answer.whole())))
    assert [choice["logprobs"] for choice in whole["choices"]] == [wanted] * 3
    assert max(sizes) == 2


PIECES = st.one_of(
    st.text(max_size=8).map(lambda text: Output(text=text, tokens=[SampledToken(1)])),
    st.text(max_size=8).map(lambda text: Output(text=text, tokens=[], reasoning="why")),
    st.sampled_from(["<text>", '"\\\u2028</s>', "😀", "\x00\x7f"]).map(
        lambda text: Output(text=text, tokens=sampled(text), prompt_logprobs=sampled("x")[:1])
    ),
    st.builds(lambda: Output(text="", tokens=[], tool_calls=[ToolCallDelta(0, "id", "name", "{")])),
)


@pytest.mark.parametrize("answer_format", [ChatFormat(), CompletionFormat()])
@given(
    pieces=st.lists(PIECES, max_size=6),
    num=st.integers(1, 3),
    wants=st.tuples(st.booleans(), st.booleans(), st.booleans()),
)
def test_chunks_of_nothing_but_text_are_as_all_others(
    answer_format: AnswerFormat, pieces: list[Output], num: int, wants: tuple[bool, bool, bool]
) -> None:
    """Their bytes are put together from those of the choice's first; the others are formatted from scratch."""
    end = Output(text="end", tokens=[], finish_reason=FinishReason.STOP, report=REPORT, usage=USAGE)

    async def events() -> list[bytes]:
        answer = CompletionAnswer(
            FakeGeneration([*pieces, end]),  # type: ignore[arg-type]
            requests(num),
            answer_format,
            request_id='<text>"',
            choices=Choices(n=num),
            wants_logprobs=wants[0],
            wants_usage_chunk=wants[1],
            hold=keep,
            wants_usage_so_far=wants[2],
        )
        answer._created = 1
        return [event async for event in answer.events(contextlib.nullcontext())]

    found = asyncio.run(events())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Output, "is_only_text", property(lambda _: False))
        assert asyncio.run(events()) == found


def test_a_text_is_all_that_its_chunk_needs() -> None:
    """What an answer mostly consists of goes the short way."""
    assert Output(text="x", tokens=[SampledToken(1)]).is_only_text
    assert not Output(text="", tokens=[SampledToken(1)]).is_only_text


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("completions", {"prompt": "x", "max_tokens": 101}, "max_tokens"),
        ("completions", {"prompt": "x", "max_tokens": 26, "n": 4}, "max_tokens"),
        ("completions", {"prompt": ["x", "y"], "max_tokens": 26, "n": 2}, "max_tokens"),
        ("completions", {"prompt": "x", "max_tokens": 51, "logprobs": 4}, "max_tokens"),
        ("completions", {"prompt": ["x"] * 101, "max_tokens": 1}, "max_tokens"),
        ("chat/completions", {"max_completion_tokens": 51, "n": 2}, "max_completion_tokens"),
        ("chat/completions", {"max_tokens": 17, "logprobs": True, "top_logprobs": 20}, "max_tokens"),
        ("chat/completions", {"min_tokens": 101}, "min_tokens"),
    ],
)
async def test_tokens_of_all_answers_to_a_body_are_bounded(
    worker: FakeWorker, start_router: StartRouter, path: str, body: dict[str, object], param: str
) -> None:
    router = await start_router(worker, max_answer_tokens=100)
    if path.startswith("chat"):
        body = {"messages": [{"role": "user", "content": "x"}], **body}
    async with httpx.AsyncClient(base_url=router.url) as client:
        answer = await client.post(f"/v1/{path}", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
        assert not worker.requests
        body = {"prompt": "x", "max_tokens": 5, "logprobs": 4, "n": 4}
        answer = await client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text


async def test_an_answer_without_a_limit_ends_at_the_routers(worker: FakeWorker, start_router: StartRouter) -> None:
    router = await start_router(worker, max_answer_tokens=12)
    async with httpx.AsyncClient(base_url=router.url) as client:
        body = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 1, "n": 2}
        answer = (await client.post("/v1/chat/completions", json=body)).json()
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length"] * 2
    assert answer["usage"]["completion_tokens"] == 6


async def test_answers_over_grpc_are_bounded(worker: FakeWorker, start_router: StartRouter) -> None:
    router = await start_router(worker, max_answer_tokens=100)
    for params, is_allowed in (
        (types_pb2.SamplingParams(max_tokens=101), False),
        (types_pb2.SamplingParams(max_tokens=51, logprobs=2), False),
        (types_pb2.SamplingParams(max_tokens=50, logprobs=2), True),
    ):
        call = router.inference.Generate(inference_pb2.GenerateRequest(prompt="x", sampling_params=params))
        if is_allowed:
            assert [response async for response in call]
            continue
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "sampling_params.max_tokens" in (caught.value.details() or "")


@pytest.mark.parametrize("max_model_len", [2**16, 2**20])
async def test_one_answer_as_long_as_the_context_is_allowed(
    worker: FakeWorker, start_router: StartRouter, max_model_len: int
) -> None:
    """With all logprobs that there are; thousands of them are not."""
    worker.false_info = {"max_model_len": max_model_len}
    router = await start_router(worker)
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": max_model_len - 1000}
    body |= {"logprobs": True, "top_logprobs": 20}
    async with httpx.AsyncClient(base_url=router.url) as client:
        answer = await client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        answer = await client.post("/v1/chat/completions", json={**body, "n": 4})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "max_tokens"), answer.text
