"""What a router tells of requests that have ended: `/requests`, gRPC, the log."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable
from typing import Any, cast

import grpc
import httpx
import openai
import pytest

from baton import Client
from baton.timeline import render_stages
from common.errors import InvalidArgumentError
from common.finished_request import FinishedRequest
from protos.baton.v1 import inference_pb2, router_pb2, types_pb2
from router.api.fleet_service import MESSAGES_AT_ONCE, FleetService
from router.api.worker_views import WorkerViews
from router.fleet.registry import Registry
from router.running.known_requests import MAX_FINISHED, MAX_REASON_CHARS, TOLD_AT_ONCE, Ending, KnownRequests
from router.running.request import Attempt, Progress
from router.running.timeline import stages
from tests.router.conftest import RunningRouter, StartRouter, StartWorker
from tests.router.test_answer import requests
from tests.support.fake_worker import ANSWER, FakeWorker

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello?"}]}
TIMINGS = types_pb2.Timings(queue_ms=30, prefill_queue_ms=20, prefill_ms=100, handoff_ms=10, first_decode_ms=5)


def report() -> types_pb2.RequestReport:
    return types_pb2.RequestReport(timings=TIMINGS, decode_worker="d:2", prefill_worker="p:1")


def spans(progress: Progress, ended_at: float) -> list[tuple[str, str, float, float]]:
    return [(one.name, one.where, one.start_ms, one.end_ms) for one in stages(progress, 10.0, ended_at)]


def test_stages_of_a_handed_over_request() -> None:
    attempt = Attempt("new", "d:2", 10.05, first_token_at=10.2)
    progress = Progress(
        report(), queued_at=10.01, turn_at=10.03, first_token_at=10.2, last_token_at=10.5, attempts=[attempt]
    )
    assert spans(progress, 10.51) == [
        ("prepare", "router", 0, 10),
        ("router queue", "router", 10, 30),
        ("route", "router", 30, 50),
        ("queue", "d:2", 50, 60),
        ("prefill queue", "p:1", 60, 80),
        ("prefill", "p:1", 80, 180),
        ("to the router", "router", 180, 200),
        ("handoff", "d:2", 200, 210),
        ("first decode", "d:2", 210, 215),
        ("decode", "d:2", 215, 500),
    ]


def test_stages_after_a_lost_worker_are_the_last_ones() -> None:
    lost = Attempt("new", "d:1", 10.1, ended_at=10.4, failure="gone")
    last = Attempt("migration", "d:2", 10.5, first_token_at=10.7)
    progress = Progress(
        report(), queued_at=10.0, turn_at=10.0, first_token_at=10.2, last_token_at=10.9, attempts=[lost, last]
    )
    names = [(name, start, end) for name, _, start, end in spans(progress, 10.9)]
    assert names[:5] == [
        ("route", 0, 100),
        ("failed attempt", 100, 400),
        ("route", 400, 500),
        ("queue", 500, 510),
        ("prefill queue", 510, 530),
    ]
    assert names[-1] == ("decode", 715, 900)


@pytest.mark.parametrize(
    ("progress", "last"),
    [
        (Progress(), ("prepare", "router", 0, 1000)),
        (Progress(queued_at=10.0), ("router queue", "router", 0, 1000)),
        (Progress(queued_at=10.0, turn_at=10.0), ("route", "router", 0, 1000)),
        (
            Progress(queued_at=10.0, turn_at=10.0, attempts=[Attempt("new", "d:1", 10.0, ended_at=10.5)]),
            ("route", "router", 500, 1000),
        ),
        (
            Progress(report(), queued_at=10.0, turn_at=10.0, attempts=[Attempt("new", "d:2", 10.0)]),
            ("no token yet", "d:2", 130, 1000),
        ),
    ],
)
def test_stages_of_a_request_that_ended_early(progress: Progress, last: tuple[str, str, float, float]) -> None:
    found = spans(progress, 11.0)
    assert found[-1] == last
    assert all(one[3] == other[2] for one, other in itertools.pairwise(found))


def test_what_workers_say_never_exceeds_the_request() -> None:
    boasts = types_pb2.RequestReport(timings=types_pb2.Timings(queue_ms=9e9, prefill_ms=9e9, handoff_ms=9e9))
    attempt = Attempt("new", "d:2", 10.0, first_token_at=10.1)
    progress = Progress(
        boasts, queued_at=10.0, turn_at=10.0, first_token_at=10.1, last_token_at=10.3, attempts=[attempt]
    )
    assert {one.end_ms for one in stages(progress, 10.0, 10.3)} == {100, 300}


def test_the_ring_is_bounded_and_tells_the_newest_first() -> None:
    known, (request,) = KnownRequests(lambda: request.arrived_at + 1.0, lambda: 1000.0), requests(1)
    for number in range(MAX_FINISHED + 3):
        known.ended(request, Progress(num_output_tokens=number), Ending("ok"))
    told = known.finished(2 * MAX_FINISHED)
    assert [one.output_tokens for one in told] == [*range(MAX_FINISHED + 2, 2, -1)]
    assert (told[0].time, told[0].total_ms) == (999.0, 1000.0)
    assert known.finished(1)[0] is told[0], "it is made once"
    assert known.finished(5, "another tenant") == []
    assert known.finished(5, None, "another id") == []
    assert len(known.finished(5, request.client.tenant, request.request_id)) == 5
    attempt = Attempt("new", "w:1", 10.0, failure="y" * 10**5)
    known.ended(request, Progress(attempts=[attempt]), Ending("unavailable", "x" * 10**5))
    (long,) = known.finished(1)
    assert (len(long.reason), len(long.attempts[0].failure)) == (MAX_REASON_CHARS, MAX_REASON_CHARS)


async def turns_of_others(work: Awaitable[object]) -> int:
    """How often another task has its turn until `work` is done."""
    num_turns = 0

    async def other() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    await work
    task.cancel()
    return num_turns


async def test_the_event_loop_is_not_held_by_who_asks_for_many() -> None:
    known, (request,) = KnownRequests(), requests(1)
    for _ in range(100):
        known.ended(request, Progress(), Ending("ok"))
    assert await turns_of_others(known.query.told(100, None, "")) >= 100 // TOLD_AT_ONCE
    assert await turns_of_others(known.query.told(100, None, "")) <= 1, "what was made is kept"

    async def latest(limit: int, _tenant: str | None, _request_id: str) -> list[FinishedRequest]:
        return known.finished(limit)

    service = FleetService(cast("Registry", None), cast("WorkerViews", None), latest)
    asked = router_pb2.GetRequestsRequest(limit=100)
    asking = service.GetRequests(asked, cast("grpc.aio.ServicerContext[object, object]", None))
    assert await turns_of_others(asking) >= 100 // MESSAGES_AT_ONCE


async def test_requests_are_told_over_rest_and_grpc(router: RunningRouter, worker: FakeWorker) -> None:
    body = {"model": "tiny", "request_id": "mine/1", **CHAT}
    async with httpx.AsyncClient(base_url=router.url) as client:
        assert (await client.post("/v1/chat/completions", json={**body, "n": 2})).status_code == 200
        worker.refuse = (grpc.StatusCode.INVALID_ARGUMENT, "no")
        assert (await client.post("/v1/completions", json={"prompt": "a", "request_id": "bad"})).status_code == 400
        told = (await client.get("/requests")).json()["requests"]
        one = (await client.get("/requests/mine/1")).json()
        assert (await client.get("/requests?limit=2")).json()["requests"] == told[:2]
        missing, wrong = await client.get("/requests/other"), await client.get("/requests?limit=0")
    assert {each["request_id"] for each in told} == {"bad", "mine/1", "mine/1-1"}
    assert one in told
    assert (one["status"], one["operation"], one["model"], one["finish_reason"]) == ("ok", "chat", "tiny", "stop")
    assert (one["decode_worker"], one["output_tokens"]) == (worker.address, len(worker.answer) + 1)
    assert 0 < one["ttft_ms"] <= one["total_ms"]
    assert [each["cause"] for each in one["attempts"]] == ["new"]
    failed = next(each for each in told if each["request_id"] == "bad")
    assert (failed["status"], failed["ttft_ms"], failed["operation"]) == ("invalid_argument", None, "text_completion")
    assert "no" in failed["reason"]
    assert (missing.status_code, missing.json()["error"]["param"]) == (404, "request_id")
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "limit")

    def ask() -> tuple[list[FinishedRequest], list[FinishedRequest]]:
        with Client(router.grpc_address, timeout=30) as client:
            with pytest.raises(InvalidArgumentError, match="limit"):
                client.requests(MAX_FINISHED + 1)
            return client.requests(), client.requests(request_id="mine/1")

    all_told, (same,) = await asyncio.to_thread(ask)
    assert [each.request_id for each in all_told] == [each["request_id"] for each in told]
    assert (same.ttft_ms, same.total_ms, same.attempts[0].decode_worker) == (
        one["ttft_ms"],
        one["total_ms"],
        worker.address,
    )
    picture = render_stages(same, ascii_only=True)
    assert "mine/1: chat tiny" in picture
    assert all(stage.name in picture for stage in same.stages)


async def test_a_migration_a_client_that_left_and_a_slow_request(
    start_worker: StartWorker, start_router: StartRouter, caplog: pytest.LogCaptureFixture
) -> None:
    workers = [await start_worker(), await start_worker()]
    workers[0].die_after = 3
    router = await start_router(*workers, slow_request_ms=0.001)
    with caplog.at_level(logging.INFO):
        for _ in range(2):  # whichever is asked first
            answer = await router.openai.chat.completions.create(model="tiny", **CHAT)
            assert answer.choices[0].message.content == ANSWER
        workers[0].hang_after = workers[1].hang_after = 2
        workers[0].die_after = None
        stream = await router.openai.chat.completions.create(model="tiny", stream=True, **CHAT)
        await anext(stream)
        await stream.close()
        async with asyncio.timeout(20), httpx.AsyncClient(base_url=router.url) as client:
            while len(told := (await client.get("/requests")).json()["requests"]) < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    assert [each["status"] for each in told] == ["cancelled", "ok", "ok"]
    migrated = next(each for each in told if each["num_migrations"])
    assert [each["cause"] for each in migrated["attempts"]] == ["new", "migration"]
    assert migrated["attempts"][0]["failure"]
    assert migrated["attempts"][0]["end_ms"] <= migrated["attempts"][1]["start_ms"]
    slow = [vars(record) for record in caplog.records if record.message == "slow request"]
    assert [(each["levelname"], each["status"]) for each in slow] == [
        ("WARNING", each) for each in ("ok", "ok", "cancelled")
    ]
    assert all("prepare" in each["timeline"] or "route" in each["timeline"] for each in slow)


async def test_a_key_sees_the_requests_of_its_tenant(
    worker: FakeWorker, start_router: StartRouter, tmp_path_factory: pytest.TempPathFactory
) -> None:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("sk-a name=a tenant=one\nsk-b name=b tenant=two\nsk-o name=o operator=true\n")
    router = await start_router(worker, api_keys_file=str(keys))
    seen = {}
    for key in ("sk-a", "sk-b"):
        client = openai.AsyncOpenAI(base_url=f"{router.url}/v1", api_key=key)
        await client.completions.create(model="tiny", prompt="a", extra_body={"request_id": f"of-{key}"})
        await client.close()
    for key in ("sk-a", "sk-b", "sk-o"):
        async with httpx.AsyncClient(base_url=router.url, headers={"Authorization": f"Bearer {key}"}) as http:
            seen[key] = {one["request_id"] for one in (await http.get("/requests")).json()["requests"]}
            status = (await http.get("/requests/of-sk-a")).status_code
            assert status == (404 if key == "sk-b" else 200)
    assert seen == {"sk-a": {"of-sk-a"}, "sk-b": {"of-sk-b"}, "sk-o": {"of-sk-a", "of-sk-b"}}
    metadata = (("authorization", "Bearer sk-a"),)
    stub = inference_pb2.GenerateRequest(prompt="x")
    assert [one async for one in router.inference.Generate(stub, metadata=metadata)]
