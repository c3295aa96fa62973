"""`echo`, `best_of` and `prompt_logprobs` of text completion, as OpenAI's and vLLM's clients ask for them."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import httpx
import pytest

from common.choices import Choices
from common.types import FinishReason, SampledToken
from protos.baton.v1 import types_pb2
from router.api.rest.openai.answer import CompletionAnswer
from router.api.rest.openai.echo import EchoedPrompt
from router.api.rest.openai.formats import CompletionFormat
from router.running.request import GenerationRequest, Output
from tests.each_case import each_case
from tests.router.conftest import RunningRouter
from tests.router.test_answer import REPORT, USAGE, FakeGeneration, keep, requests
from tests.router.tiny_tokenizer import ids_of, tiny_tokenizer
from tests.support.fake_worker import ANSWER, FakeWorker

PROMPT = "naïve café 😀 The capital"
IDS = ids_of(PROMPT)

Json = dict[str, object]


async def complete(router: RunningRouter, **body: object) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=router.url) as client:
        answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    whole: dict[str, Any] = answer.json()
    return whole


def texts_at(logprobs: dict[str, list[object]], text: str) -> None:
    """Each token's text is where its offset says, unless it is only a part of a character."""
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert isinstance(token, str)
        assert isinstance(offset, int)
        assert token.startswith("bytes:") or text.startswith(token, offset)


@each_case("prompt", [PROMPT, IDS])
async def test_the_prompt_comes_first(router: RunningRouter, worker: FakeWorker, prompt: object) -> None:
    worker.requests.clear()
    whole = await complete(router, prompt=prompt, echo=True, logprobs=1, max_tokens=4, n=2)
    assert [request.sampling_params.HasField("prompt_logprobs") for request in worker.requests] == [True, False]
    for choice in whole["choices"]:
        assert choice["text"] == PROMPT + ANSWER[: len(choice["text"]) - len(PROMPT)]
        logprobs = choice["logprobs"]
        assert logprobs["token_logprobs"] == [None, *(-at for at in range(1, len(IDS))), *([-0.5] * 4)]
        tops = logprobs["top_logprobs"]
        assert tops[0] is None
        for own, top in list(zip(logprobs["token_logprobs"], tops, strict=True))[1:]:
            assert isinstance(top, dict)
            assert own == max(top.values())  # so harnesses find that a token is the likeliest
        texts_at(logprobs, str(choice["text"]))
        assert logprobs["text_offset"][len(IDS)] == len(PROMPT)
        assert "prompt_logprobs" not in choice
    assert whole["usage"]["prompt_tokens"] == len(IDS)


async def test_a_prompt_without_logprobs(router: RunningRouter, worker: FakeWorker) -> None:
    whole = await complete(router, prompt=[PROMPT, "two"], echo=True, max_tokens=1)
    assert str(whole["choices"][0]["text"]).startswith(PROMPT)
    assert str(whole["choices"][1]["text"]).startswith("two")
    assert not any(request.sampling_params.HasField("prompt_logprobs") for request in worker.requests)


async def test_nothing_but_the_prompt(router: RunningRouter) -> None:
    whole = await complete(router, prompt=PROMPT, echo=True, logprobs=0, max_tokens=0)
    (choice,) = whole["choices"]
    assert (choice["text"], choice["finish_reason"]) == (PROMPT, "length")
    assert choice["logprobs"]["token_logprobs"] == [None, *(-at for at in range(1, len(IDS)))]
    assert whole["usage"]["completion_tokens"] == 0


async def test_as_lm_eval_asks(router: RunningRouter) -> None:
    """`local-completions`: batches of token ids; it sums the logprobs after the context and before the last token."""
    prompts = [IDS, ids_of("two, how are you")]
    asked = {"temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    whole = await complete(router, model="tiny", prompt=prompts, **asked)
    for prompt, choice in zip(prompts, whole["choices"], strict=True):
        assert choice["logprobs"]["token_logprobs"][2:-1] == [-at for at in range(2, len(prompt))]


@each_case("prompt", [PROMPT, "a"])
async def test_streams_begin_with_it(router: RunningRouter, prompt: str) -> None:
    body = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 3, "stream": True}
    async with httpx.AsyncClient(base_url=router.url) as client:
        answer = await client.post("/v1/completions", json=body)
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    choices = [choice for event in events for choice in event["choices"]]
    joined = {
        name: [one for choice in choices if choice["logprobs"] for one in choice["logprobs"][name]]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    }
    whole = (await complete(router, **{**body, "stream": False}))["choices"][0]
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    assert joined == whole["logprobs"]


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
async def test_prompt_logprobs_in_vllms_shape(router: RunningRouter, worker: FakeWorker, path: str) -> None:
    body: Json = {"messages": [{"role": "user", "content": "x"}]} if path.startswith("chat") else {"prompt": PROMPT}
    async with httpx.AsyncClient(base_url=router.url) as client:
        answer = (await client.post(f"/v1/{path}", json={**body, "prompt_logprobs": 2, "max_tokens": 2})).json()
    prompt = list(worker.requests[0].prompt_token_ids)
    scores = answer["prompt_logprobs"] if path.startswith("chat") else answer["choices"][0]["prompt_logprobs"]
    assert scores[0] is None
    for position, (score, token_id) in enumerate(zip(scores[1:], prompt[1:], strict=True), 1):
        text = tiny_tokenizer().token_bytes(token_id).decode(errors="replace")
        own = {"logprob": -position, "rank": 1, "decoded_token": text}
        assert next(iter(score)) == str(token_id)
        assert score[str(token_id)] == own
        assert [one["rank"] for one in score.values()] == [1, 2]


def test_where_tokens_are_in_a_text() -> None:
    """A token that the tokenizer put before the text is not in it."""
    prompt = EchoedPrompt("naïve", [0], generates=True)
    tokens = [SampledToken(token_id) for token_id in [0, *ids_of("naïve")]]
    offsets = prompt.offsets(tokens[:2], tiny_tokenizer()) + prompt.offsets(tokens[2:], tiny_tokenizer())
    assert offsets[:2] == [0, 0]
    assert offsets == sorted(offsets)
    assert offsets[-1] < len("naïve")


class Candidates(FakeGeneration):
    """Each request's answer has tokens of its own logprobs."""

    def __init__(self, logprobs: Sequence[Sequence[float]]) -> None:
        super().__init__()
        self._logprobs = logprobs

    async def generate(self, request: GenerationRequest, index: int = 0) -> AsyncGenerator[tuple[int, Output], None]:
        number = int(request.request_id)
        for logprob in self._logprobs[number]:
            yield index, Output(text="", tokens=[SampledToken(1, logprob)])
        yield index, Output(text=f"{number}", tokens=[], finish_reason=FinishReason.STOP, report=REPORT, usage=USAGE)


async def test_the_best_per_token_are_kept() -> None:
    """Of two prompts with three candidates each, two: by the mean, so that length does not decide."""
    candidates = Candidates([[-1.0], [-0.9, -0.9], [-3.0], [-0.1], [-0.3, -0.1], [-0.15] * 9])
    answer = CompletionAnswer(
        candidates,  # type: ignore[arg-type]
        requests(6),
        CompletionFormat(),
        request_id="r",
        choices=Choices(n=2, best_of=3),
        wants_logprobs=False,
        wants_usage_chunk=False,
        hold=keep,
    )
    choices = (await answer.whole())["choices"]
    assert isinstance(choices, list)
    assert [(one["index"], one["text"]) for one in choices] == [(0, "1"), (1, "0"), (2, "3"), (3, "5")]
    assert all(one["logprobs"] is None for one in choices)


async def test_best_of(router: RunningRouter, worker: FakeWorker) -> None:
    whole = await complete(router, prompt=PROMPT, best_of=3, n=2, max_tokens=2)
    assert [choice["index"] for choice in whole["choices"]] == [0, 1]
    assert [choice["logprobs"] for choice in whole["choices"]] == [None, None]
    assert whole["usage"]["completion_tokens"] == 6
    asked: list[types_pb2.SamplingParams] = [request.sampling_params for request in worker.requests]
    assert len({params.seed for params in asked}) == 3
    assert all(params.HasField("logprobs") for params in asked)
