"""Beam search over REST and gRPC, in gateway of a worker whose model is a table."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import grpc
import httpx
import pytest

from baton.client.async_client import AsyncClient
from common.beam_search import Beam, BeamSearch, BeamSearchParams
from common.errors import InvalidArgumentError, OverloadedError, UnavailableError
from common.sampling import MAX_LOGPROBS
from common.types import FinishReason, TokenLogprob
from router.limits.request_queue import RequestQueue
from router.processes.messages import Enter, Message, Placed
from router.processes.remote_queue import RemoteQueue
from router.running import beams
from tests.each_case import each_case
from tests.router import chat_templates
from tests.router.conftest import RunningRouter, StartRouter, StartWorker, reaches, sample
from tests.router.tiny_tokenizer import eos_id, tiny_tokenizer, vocab_size
from tests.router.tool_calls import ASK, TOOL
from tests.support.fake_worker import FakeWorker

PROMPT = [5, 6, 7]
LIKELY = [11, 13, 17, 19]


def scores(token_ids: list[int]) -> list[float]:
    """Ends of sequence are likely, so that beams end at all lengths."""
    drawn = random.Random(str(token_ids))
    found = [-50.0 - token_id / 100 for token_id in range(vocab_size())]
    for token_id in (*LIKELY, eos_id()):
        found[token_id] = -drawn.choice((0.5, 1.0, 1.5, 2.0)) - drawn.random() / 100
    return found


def beams_of(params: BeamSearchParams, prompt: list[int] = PROMPT) -> list[Beam]:
    search = BeamSearch(params, [eos_id()])
    while search.running:
        tables = [scores([*prompt, *beam.token_ids]) for beam in search.running]
        search.advance([[TokenLogprob(i, logprob) for i, logprob in enumerate(table)] for table in tables])
    return search.finished


@pytest.fixture
async def worker(start_worker: StartWorker) -> FakeWorker:
    worker = await start_worker()
    worker.scores = scores
    return worker


@each_case(("width", "penalty", "early"), [(1, 1.0, False), (3, 1.0, False), (4, 0.0, True), (8, 2.0, False)])
async def test_the_clients_get_the_beams(router: RunningRouter, width: int, penalty: float, early: bool) -> None:
    params = BeamSearchParams(beam_width=width, max_tokens=6, length_penalty=penalty, early_stopping=early)
    wanted = beams_of(params)
    async with AsyncClient(router.grpc_address) as client:
        results = await client.generate(
            PROMPT, n=width, use_beam_search=True, length_penalty=penalty, early_stopping=early, max_tokens=6
        ).results()
    assert [(one.token_ids, one.finish_reason) for one in results] == [(b.token_ids, b.finish_reason) for b in wanted]
    assert [one.cumulative_logprob for one in results] == pytest.approx([beam.logprob for beam in wanted], abs=1e-5)
    assert [one.text for one in results] == [tiny_tokenizer().decode(list(beam.token_ids)) for beam in wanted]
    assert {one.usage.prompt_tokens for one in results} == {3}
    assert [one.usage.completion_tokens for one in results] == [len(beam.token_ids) for beam in wanted]
    if width == 8:
        assert {one.finish_reason for one in results} == {FinishReason.STOP, FinishReason.LENGTH}


async def test_rest(router: RunningRouter, worker: FakeWorker) -> None:
    wanted = beams_of(BeamSearchParams(beam_width=3, max_tokens=5))
    body = {"prompt": [PROMPT, [*PROMPT, 8]], "n": 3, "use_beam_search": True, "max_tokens": 5, "temperature": 0}
    async with httpx.AsyncClient(base_url=router.url) as client:
        answer = (await client.post("/v1/completions", json=body)).json()
        texts = [choice["text"] for choice in answer["choices"]]
        assert [choice["index"] for choice in answer["choices"]] == list(range(6))
        assert texts[:3] == [tiny_tokenizer().decode(list(beam.token_ids)) for beam in wanted]
        second = beams_of(BeamSearchParams(beam_width=3, max_tokens=5), [*PROMPT, 8])
        assert texts[3:] == [tiny_tokenizer().decode(list(beam.token_ids)) for beam in second]
        assert answer["usage"]["prompt_tokens"] == 7
        assert answer["usage"]["completion_tokens"] == sum(len(beam.token_ids) for beam in (*wanted, *second))
        num_steps = max(len(one.prompt_token_ids) for one in worker.requests) - 3
        assert answer["baton"]["num_blocks_moved"] >= 2 * (1 + 3 * (num_steps - 1))  # of all requests for next tokens
        chat = {"messages": [{"role": "user", "content": "x"}], "n": 2, "use_beam_search": True, "max_tokens": 4}
        answer = (await client.post("/v1/chat/completions", json=chat)).json()
        assert len(answer["choices"]) == 2
        decisions = (await client.get("/decisions")).json()["decisions"]
    assert len(decisions) == 3  # one for each search, and not one for each token


@each_case(
    ("more", "field"),
    [
        ({"stream": True}, "stream"),
        ({"temperature": 0.7}, "temperature"),
        ({"top_p": 0.5}, "top_p"),
        ({"stop": ["x"]}, "stop"),
        ({"logprobs": 0}, "logprobs"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"guided_regex": "a+"}, "guided_regex"),
        ({"best_of": 4}, "best_of"),
        ({"n": 9}, "n"),
        ({"length_penalty": 101}, "length_penalty"),
        ({"use_beam_search": False, "length_penalty": 2}, "length_penalty"),
        ({"use_beam_search": False, "early_stopping": True}, "early_stopping"),
        ({"max_tokens": 10**6}, "max_tokens"),
    ],
)
async def test_what_is_refused(router: RunningRouter, worker: FakeWorker, more: dict[str, Any], field: str) -> None:
    body = {"prompt": PROMPT, "n": 2, "use_beam_search": True, "max_tokens": 5, **more}
    async with httpx.AsyncClient(base_url=router.url) as client:
        answer = await client.post("/v1/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), answer.text
    assert not worker.requests


async def test_long_prompts_bound_a_search(
    router: RunningRouter, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beams times tokens times blocks of the prompt; PROMPT has one block, and 17 tokens have two."""
    monkeypatch.setattr(beams, "MAX_BLOCKS", 20)
    body = {"prompt": PROMPT, "n": 2, "use_beam_search": True, "max_tokens": 10}
    async with httpx.AsyncClient(base_url=router.url) as client:
        for more in ({"max_tokens": 11}, {"prompt": [5] * 17, "max_tokens": 6}, {"prompt": [PROMPT] * 2}):
            answer = await client.post("/v1/completions", json={**body, **more})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "max_tokens"), answer.text
        assert not worker.requests
        for more in ({}, {"prompt": [5] * 17, "max_tokens": 5}):
            assert (await client.post("/v1/completions", json={**body, **more})).status_code == 200
        chat = {"messages": [{"role": "user", "content": "x"}], "n": 2, "use_beam_search": True}
        assert (await client.post("/v1/chat/completions", json=chat)).status_code == 200, "it has what the bound leaves"
    async with AsyncClient(router.grpc_address) as grpc_client:
        with pytest.raises(InvalidArgumentError, match=r"max_tokens.* 10 tokens are the most"):
            await grpc_client.generate(PROMPT, n=2, use_beam_search=True, max_tokens=11).results()


def test_what_the_docs_say_of_that_bound() -> None:
    assert beams.most_tokens(4, 131_072, 16) == 128
    assert beams.most_tokens(4, 2_048, 16) == 8_192


async def test_forced_calls_are_refused(worker: FakeWorker, start_router: StartRouter) -> None:
    worker.chat_template = chat_templates.HERMES
    router = await start_router(worker)
    body = {"messages": ASK, "tools": [TOOL], "tool_choice": "required", "use_beam_search": True, "n": 2}
    async with httpx.AsyncClient(base_url=router.url) as client:
        answer = await client.post("/v1/chat/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools"), answer.text


async def test_a_model_with_many_ends(worker: FakeWorker, start_router: StartRouter) -> None:
    """Beside the ends, as many likeliest tokens are needed as there are beams."""
    worker.false_info = {"eos_token_ids": range(MAX_LOGPROBS - 3)}
    router = await start_router(worker)
    body = {"prompt": PROMPT, "n": 4, "use_beam_search": True, "max_tokens": 2}
    async with httpx.AsyncClient(base_url=router.url) as client:
        refused = await client.post("/v1/completions", json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "n")
        assert "at most 3" in refused.json()["error"]["message"]
        assert (await client.post("/v1/completions", json={**body, "n": 3})).status_code == 200
        assert (await client.post("/v1/completions", json={**body, "ignore_eos": True})).status_code == 200


async def test_all_steps_go_to_one_worker_and_another_takes_over(
    start_worker: StartWorker, start_router: StartRouter
) -> None:
    workers = [await start_worker() for _ in range(2)]
    for worker in workers:
        worker.scores = scores
    router = await start_router(*workers)
    wanted = [beam.token_ids for beam in beams_of(BeamSearchParams(beam_width=3, max_tokens=6))]
    async with AsyncClient(router.grpc_address) as client:
        results = await client.generate(PROMPT, n=3, use_beam_search=True, max_tokens=6).results()
        (used,) = [worker for worker in workers if worker.requests]
        used.refuse = (grpc.StatusCode.UNAVAILABLE, "gone")
        again = await client.generate(PROMPT, n=3, use_beam_search=True, max_tokens=6).results()
    assert [one.token_ids for one in results] == [one.token_ids for one in again] == wanted


async def test_cancelling_ends_all_beams(router: RunningRouter, worker: FakeWorker) -> None:
    async with AsyncClient(router.grpc_address) as client:
        worker.scores, worker.hang_after = None, 0
        before = sample("baton_router_requests_total", interface="grpc", outcome="cancelled")
        answer = client.generate(PROMPT, n=3, use_beam_search=True, max_tokens=6)
        await worker.asked.wait()
        answer.cancel()
        async with asyncio.timeout(20):
            await worker.cancelled.wait()
        await reaches("baton_router_requests_total", before + 1, interface="grpc", outcome="cancelled")


async def test_a_failure_ends_the_search(router: RunningRouter, worker: FakeWorker) -> None:
    async with AsyncClient(router.grpc_address) as client:
        worker.scores = lambda token_ids: scores(token_ids)[:2]  # fewer than were asked for
        with pytest.raises(Exception, match="gave no 4 likeliest"):
            await client.generate(PROMPT, n=3, use_beam_search=True, max_tokens=6).results()
        worker.refuse = (grpc.StatusCode.UNAVAILABLE, "gone")
        with pytest.raises(UnavailableError):
            await client.generate(PROMPT, n=3, use_beam_search=True, max_tokens=6).results()


async def test_each_beam_counts(worker: FakeWorker, start_router: StartRouter) -> None:
    router = await start_router(worker, max_requests=2)
    async with AsyncClient(router.grpc_address) as client:
        with pytest.raises(OverloadedError):
            await client.generate(PROMPT, n=3, use_beam_search=True, max_tokens=6).results()
    assert not worker.requests


async def test_a_search_takes_a_place_for_each_beam() -> None:
    queue = RequestQueue(2)
    began: list[str] = []
    free = asyncio.Event()

    async def one(name: str, places: int) -> None:
        async with queue.place(name, 1, places=places):
            began.append(name)
            await free.wait()

    tasks = [asyncio.create_task(one(name, places)) for name, places in (("a", 3), ("b", 1), ("c", 1))]
    await asyncio.sleep(0)
    assert (began, queue.num_waiting) == (["a"], 2)
    free.set()
    await asyncio.gather(*tasks)
    assert began == ["a", "b", "c"]


async def test_processes_ask_their_parent_for_as_many_places() -> None:
    sent: list[Message] = []
    queue = RemoteQueue(2, sent.append)
    searching = asyncio.create_task(queue.place("a", 1, places=3).__aenter__())
    await asyncio.sleep(0)
    assert isinstance(sent[0], Enter)
    assert sent[0].places == 3
    queue.heard(Placed(sent[0].number))
    await searching
