"""Logprobs of prompts: where they are computed, that each comes once, what a worker may say of them, their bound."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import pytest

from common.types import WorkerRole
from protos.baton.v1 import decode_pb2, inference_pb2, types_pb2
from tests.router.conftest import RunningRouter, StartRouter, StartWorker, all_seen
from tests.router.tiny_tokenizer import ids_of
from tests.support.fake_worker import ANSWER, FakeWorker

PROMPT = "Hello, how are you today? The capital"
IDS = ids_of(PROMPT)


async def ask(router: RunningRouter, **params: Any) -> list[inference_pb2.GenerateResponse]:
    asked = types_pb2.SamplingParams(**{"prompt_logprobs": 2, **params})
    call = router.inference.Generate(inference_pb2.GenerateRequest(prompt=PROMPT, sampling_params=asked))
    return [response async for response in call]


def assert_whole(responses: list[inference_pb2.GenerateResponse]) -> None:
    scores = [score for response in responses for score in response.prompt_logprobs]
    assert [(one.token_id, one.logprob) for one in scores] == [(IDS[at], -at) for at in range(1, len(IDS))]
    assert all(len(one.top_logprobs) == 2 for one in scores)
    assert "".join(response.text for response in responses) == ANSWER
    with_tokens = [bool(response.token_ids) for response in responses]
    assert not any(response.prompt_logprobs for response in responses[with_tokens.index(True) :])


async def test_the_decode_worker_computes_them(start_worker: StartWorker, start_router: StartRouter) -> None:
    """No prefill worker is named, although there is one."""
    worker = await start_worker(WorkerRole.DECODE)
    router = await start_router(worker, prefill=(await start_worker(WorkerRole.PREFILL),))
    await all_seen({WorkerRole.DECODE: 1, WorkerRole.PREFILL: 1})
    assert_whole(await ask(router))
    assert not worker.requests[0].prefill_addresses
    plain = inference_pb2.GenerateRequest(prompt=PROMPT * 9)
    assert [response async for response in router.inference.Generate(plain)]
    assert worker.requests[1].prefill_addresses


@pytest.mark.parametrize("num_tokens", [0, 1])
async def test_each_comes_once_whatever_happens(
    start_worker: StartWorker, start_router: StartRouter, num_tokens: int
) -> None:
    """The first worker fails before or after the first token; in between, the caller has them all."""
    first, second = await start_worker(), await start_worker()
    second.num_requests_waiting = 5
    first.die_after = num_tokens
    assert_whole(await ask(await start_router(first, second)))
    assert len(second.requests) == 1


async def test_they_may_come_with_the_last_token(worker: FakeWorker, router: RunningRouter) -> None:
    scores: list[types_pb2.SampledToken] = []

    def together(event: decode_pb2.DecodeEvent) -> None:
        if event.tokens:
            event.prompt_logprobs.extend(scores)
        else:
            scores.extend(event.prompt_logprobs)
            event.Clear()

    worker.spoil = together
    responses = await ask(router, max_tokens=1)
    assert [one.token_id for response in responses for one in response.prompt_logprobs] == IDS[1:]


def second_piece_without(event: decode_pb2.DecodeEvent) -> None:
    if len(event.prompt_logprobs) > 3:
        event.prompt_logprobs[0].ClearField("logprob")


async def test_a_worker_fails_in_the_middle_of_them(start_worker: StartWorker, start_router: StartRouter) -> None:
    first, second = await start_worker(), await start_worker()
    second.num_requests_waiting = 5
    first.spoil = second_piece_without
    assert_whole(await ask(await start_router(first, second)))


@pytest.mark.parametrize("best_of", [3, 5])
@pytest.mark.parametrize(
    "fails", ["nobody", "before the scores", "among the scores", "before a token", "after a token"]
)
async def test_only_the_first_answer_asks_for_them(
    start_worker: StartWorker, start_router: StartRouter, fails: str, best_of: int
) -> None:
    """Every answer has them, before its first token; the others begin when the first one has all of them."""
    first, second = await start_worker(), await start_worker()
    second.num_requests_waiting = 5
    scored_before: list[bool] = []

    def spoil(event: decode_pb2.DecodeEvent) -> None:
        if fails == "among the scores":
            second_piece_without(event)
        if not event.prompt_logprobs:
            return
        scored_before.append(len(first.requests) + len(second.requests) > 2)
        if fails == "before the scores":
            another_token(event)

    first.spoil = spoil
    first.die_after = {"before a token": 0, "after a token": 1}.get(fails)
    router = await start_router(first, second)
    asked = types_pb2.SamplingParams(prompt_logprobs=2)
    choices = inference_pb2.Choices(n=3, best_of=best_of)
    call = router.inference.Generate(
        inference_pb2.GenerateRequest(prompt=PROMPT, sampling_params=asked, choices=choices)
    )
    responses = [response async for response in call]
    for index in range(3):
        assert_whole([response for response in responses if response.index == index])
    assert scored_before == [False] * len(scored_before)
    assert len(scored_before) > 0
    ids = [
        request.request_id
        for request in (*first.requests, *second.requests)
        if request.sampling_params.HasField("prompt_logprobs")
    ]
    assert len(ids) == (1 if fails == "nobody" else 2)
    assert len(set(ids)) == 1
    assert len({request.request_id for request in (*first.requests, *second.requests)}) == best_of


async def test_a_prompt_of_one_token_has_none(router: RunningRouter, worker: FakeWorker) -> None:
    """All answers come nevertheless."""
    asked = types_pb2.SamplingParams(prompt_logprobs=2)
    call = router.inference.Generate(
        inference_pb2.GenerateRequest(
            prompt_token_ids=IDS[:1], sampling_params=asked, choices=inference_pb2.Choices(n=3)
        )
    )
    responses = [response async for response in call]
    assert not any(response.prompt_logprobs for response in responses)
    assert sorted(response.index for response in responses if response.finish_reason) == [0, 1, 2]


async def test_the_first_answer_s_failure_ends_all(router: RunningRouter, worker: FakeWorker) -> None:
    """Those that wait for its scores do not wait for ever."""
    worker.spoil = another_token
    asked = types_pb2.SamplingParams(prompt_logprobs=2)
    call = router.inference.Generate(
        inference_pb2.GenerateRequest(prompt=PROMPT, sampling_params=asked, choices=inference_pb2.Choices(n=8))
    )
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    assert " sends " in (caught.value.details() or "")
    assert len({request.request_id for request in worker.requests}) == 1


def another_token(event: decode_pb2.DecodeEvent) -> None:
    for score in event.prompt_logprobs:
        score.token_id += 1


def none_at_all(event: decode_pb2.DecodeEvent) -> None:
    del event.prompt_logprobs[:]


def too_many(event: decode_pb2.DecodeEvent) -> None:
    for _ in range(len(IDS) if event.prompt_logprobs else 0):
        event.prompt_logprobs.add(token_id=IDS[-1], logprob=-1.0)


def without_logprob(event: decode_pb2.DecodeEvent) -> None:
    for score in event.prompt_logprobs:
        score.ClearField("logprob")


@pytest.mark.parametrize("spoil", [another_token, none_at_all, too_many, without_logprob])
async def test_false_ones_are_not_taken(
    worker: FakeWorker, router: RunningRouter, spoil: Callable[[decode_pb2.DecodeEvent], None]
) -> None:
    """A worker of an older version knows nothing of them, and sends none."""
    worker.spoil = spoil
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ask(router)
    assert " sends " in (caught.value.details() or "")


def unasked(event: decode_pb2.DecodeEvent) -> None:
    event.prompt_logprobs.add(token_id=IDS[1], logprob=-1.0)


async def test_nobody_gets_what_he_did_not_ask_for(worker: FakeWorker, router: RunningRouter) -> None:
    worker.spoil = unasked
    with pytest.raises(grpc.aio.AioRpcError):
        async for _ in router.inference.Generate(inference_pb2.GenerateRequest(prompt=PROMPT)):
            pass


async def test_they_count_as_part_of_the_answer(worker: FakeWorker, start_router: StartRouter) -> None:
    """Each prompt token is one, and one more for four logprobs beside it."""
    num = len(IDS)
    router = await start_router(worker, max_answer_tokens=2 * num + 4)
    assert sum(len(response.token_ids) for response in await ask(router)) == 4
    for params, field in (({"max_tokens": 5}, "max_tokens"), ({"prompt_logprobs": 5}, "prompt_logprobs")):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask(router, **params)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert f"sampling_params.{field}" in (caught.value.details() or "")
