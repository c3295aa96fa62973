"""Several answers to one prompt over gRPC, and as the Python clients give them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import grpc
import pytest

from baton.client.async_client import AsyncClient
from baton.client.sync_client import Client
from common.choices import ChoiceOptions, Choices
from common.errors import InvalidArgumentError, UnavailableError
from common.types import FinishReason, SampledToken
from protos.baton.v1 import inference_pb2, types_pb2
from router.running.request import Output
from router.serving.choices import likeliest
from tests.each_case import each_case
from tests.router.conftest import RunningRouter, StartRouter, StartWorker
from tests.router.test_grpc import violated_field
from tests.router.tiny_tokenizer import eos_id
from tests.support.fake_worker import ANSWER, FakeWorker


def request_of(**choices: Any) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(
        request_id="r1",
        prompt="Hello",
        sampling_params=types_pb2.SamplingParams(seed=7),
        choices=inference_pb2.Choices(**choices),
    )


def test_the_wire_and_the_declaration_have_the_same_fields() -> None:
    fields = set(inference_pb2.Choices.DESCRIPTOR.fields_by_name)
    assert fields == set(Choices.__dataclass_fields__) == set(ChoiceOptions.__annotations__)


async def test_answers_are_told_apart_by_index(router: RunningRouter, worker: FakeWorker) -> None:
    worker.delay_s = 0.001
    responses = [response async for response in router.inference.Generate(request_of(n=3))]
    assert {response.request_id for response in responses} == {"r1"}
    for index in range(3):
        own = [response for response in responses if response.index == index]
        assert "".join(response.text for response in own) == ANSWER
        assert [bool(response.finish_reason) for response in own] == [False] * (len(own) - 1) + [True]
        assert own[-1].usage.completion_tokens == len(worker.answer) + 1
        assert own[-1].report.decode_worker == worker.address
    seen = [response.index for response in responses]
    assert seen != sorted(seen)  # they come side by side
    asked = {(request.request_id, request.sampling_params.seed) for request in worker.requests}
    assert asked == {("r1", 7), ("r1-1", 8), ("r1-2", 9)}


async def test_all_answers_come_from_one_decode_worker(start_worker: StartWorker, start_router: StartRouter) -> None:
    workers = [await start_worker() for _ in range(3)]
    router = await start_router(*workers)
    responses = [response async for response in router.inference.Generate(request_of(n=8))]
    assert len({response.report.decode_worker for response in responses if response.finish_reason}) == 1
    assert sorted(len(worker.requests) for worker in workers) == [0, 0, 8]


async def test_one_answer_has_index_0(router: RunningRouter) -> None:
    """What clients read that know nothing of `choices`."""
    request = inference_pb2.GenerateRequest(prompt="Hello")
    responses = [response async for response in router.inference.Generate(request)]
    assert "".join(response.text for response in responses) == ANSWER
    assert not any(response.index for response in responses)
    assert [bool(response.finish_reason) for response in responses].count(True) == 1


async def test_the_best_of_several(router: RunningRouter, worker: FakeWorker) -> None:
    responses = [response async for response in router.inference.Generate(request_of(n=2, best_of=4))]
    assert len(worker.requests) == 4
    assert all(request.sampling_params.logprobs == 0 for request in worker.requests)
    assert all(request.sampling_params.HasField("logprobs") for request in worker.requests)
    assert [response.index for response in responses] == sorted(response.index for response in responses)
    assert {response.index for response in responses} == {0, 1}
    assert not any(response.logprobs for response in responses)  # they were not asked for
    request = request_of(n=1, best_of=2)
    request.sampling_params.logprobs = 1
    responses = [response async for response in router.inference.Generate(request)]
    assert all(len(response.logprobs) == len(response.token_ids) for response in responses)


async def test_the_likeliest_are_given_best_first() -> None:
    async def outputs() -> AsyncGenerator[tuple[int, Output], None]:
        for index, logprobs in enumerate([[-3.0], [-1.0, -1.0, -1.0], [-2.0, -2.0]]):
            for logprob in logprobs:
                yield index, Output(text=str(index), tokens=[SampledToken(5, logprob)])

    held: list[int] = []
    found = [(index, output.text) async for index, output in likeliest(outputs(), Choices(n=2, best_of=3), held.append)]
    assert found == [(0, "1"), (0, "1"), (0, "1"), (1, "2"), (1, "2")]
    assert len(held) == 6  # what is kept until all are whole


@each_case(
    ("choices", "field"),
    [
        ({"n": 0}, "n"),
        ({"n": -1}, "n"),
        ({"n": 129}, "n"),
        ({"n": 9, "use_beam_search": True}, "n"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"best_of": 21}, "best_of"),
    ],
)
async def test_counts_out_of_range(router: RunningRouter, choices: dict[str, int], field: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await router.inference.Generate(request_of(**choices)).read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert violated_field(caught.value) == f"choices.{field}"


async def test_each_answer_counts(worker: FakeWorker, start_router: StartRouter) -> None:
    router = await start_router(worker, max_requests=2)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await router.inference.Generate(request_of(n=3)).read()
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert not worker.requests


async def test_a_cancelled_call_ends_all_answers(router: RunningRouter, worker: FakeWorker) -> None:
    worker.hang_after = 1
    call = router.inference.Generate(request_of(n=2))
    async for response in call:
        if response.index == 1:
            break
    assert len(worker.requests) == 2
    call.cancel()
    async with asyncio.timeout(20):
        await worker.cancelled.wait()


async def test_one_failure_ends_the_call(router: RunningRouter, worker: FakeWorker) -> None:
    worker.refuse = (grpc.StatusCode.UNAVAILABLE, "gone")
    async with AsyncClient(router.grpc_address) as client:
        with pytest.raises(UnavailableError):
            await client.generate("Hello", n=3).results()


async def test_the_clients_give_all_answers(router: RunningRouter, worker: FakeWorker) -> None:
    async with AsyncClient(router.grpc_address) as client:
        answer = client.chat("Hello", n=3, temperature=0)
        indexes = {chunk.index async for chunk in answer}
        results = await answer.results()
        assert indexes == {0, 1, 2}
        assert [result.text for result in results] == [ANSWER] * 3
        assert answer.text == (await answer.result()).text == ANSWER
        (one,) = await client.generate("Hello").results()
        assert one.token_ids == (*worker.answer, eos_id())

    def ask() -> None:
        with Client(router.grpc_address) as client:
            results = client.generate("Hello", n=2, best_of=3).results()
            assert [(result.text, result.finish_reason) for result in results] == [(ANSWER, FinishReason.STOP)] * 2
            with pytest.raises(InvalidArgumentError) as caught:
                client.generate("Hello", n=129).result()
            assert caught.value.field == "choices.n"
            with pytest.raises(InvalidArgumentError) as caught:
                client.generate("Hello", n="two")  # type: ignore[arg-type]
            assert caught.value.field == "n"

    await asyncio.to_thread(ask)
