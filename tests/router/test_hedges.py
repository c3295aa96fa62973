"""What a router has to do with a second prefill worker: when it is asked, and what that costs."""

from __future__ import annotations

from typing import Any

import pytest

from common.retry_budget import RetryBudget
from common.types import WorkerRole
from protos.baton.v1 import decode_pb2, inference_pb2, types_pb2
from router.fleet.track_record import TrackRecord
from router.running.prefill_times import LATE_FACTOR, MIN_PROMPTS
from tests.router.conftest import RunningRouter, StartRouter, StartWorker
from tests.support.fake_worker import FakeWorker

PREFILL_S = 0.6


class Fleet:
    """A decode worker and two prefill workers, each of whose prompts takes PREFILL_S."""

    def __init__(self, decode: FakeWorker, prefill: tuple[FakeWorker, FakeWorker], router: RunningRouter) -> None:
        self.decode, self.prefill, self._router = decode, prefill, router
        self.reported = types_pb2.RequestReport()
        self.blames: list[int] = []  # which of those that the decode worker was told of
        self.gave = 0  # the one that gave the first token
        self._num_asked = 0
        decode.spoil = self._report

    def _report(self, event: decode_pb2.DecodeEvent) -> None:
        asked = self.decode.requests[-1].prefill_addresses
        event.report.CopyFrom(self.reported)
        event.report.prefill_worker = asked[self.gave]
        event.blamed_prefill_addresses.extend(asked[index] for index in self.blames)
        event.report.timings.prefill_queue_ms = 200.0
        event.report.timings.prefill_ms = PREFILL_S * 1000 - 200.0

    async def ask(self, times: int = 1) -> tuple[decode_pb2.DecodeRequest, types_pb2.RequestReport]:
        """What the decode worker was asked, and the report, of the last time."""
        for _ in range(times):
            self._num_asked += 1  # a prompt that nobody has cached
            params = types_pb2.SamplingParams(max_tokens=2)
            request = inference_pb2.GenerateRequest(prompt=f"{self._num_asked} " * 40, sampling_params=params)
            responses = [response async for response in self._router.inference.Generate(request)]
        return self.decode.requests[-1], responses[-1].report


@pytest.fixture
async def fleet(start_worker: StartWorker, start_router: StartRouter) -> Fleet:
    prefill = (await start_worker(role=WorkerRole.PREFILL), await start_worker(role=WorkerRole.PREFILL))
    decode = await start_worker()
    return Fleet(decode, prefill, await start_router(decode, prefill=prefill, hedge_prefill=True))


async def test_a_decode_worker_is_told_how_late_is_late(fleet: Fleet) -> None:
    await fleet.ask(MIN_PROMPTS)
    assert not any(request.HasField("hedge_after_s") for request in fleet.decode.requests)
    request, _ = await fleet.ask()
    assert LATE_FACTOR * PREFILL_S / 2 < request.hedge_after_s < LATE_FACTOR * PREFILL_S * 2
    assert len(request.prefill_addresses) == 2


async def test_nobody_is_late_if_nobody_wants_to_know(
    fleet: Fleet, start_router: StartRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet._router = await start_router(fleet.decode, prefill=fleet.prefill)
    request, _ = await fleet.ask(MIN_PROMPTS + 1)
    assert not request.HasField("hedge_after_s")


async def test_without_a_budget_nobody_is_asked_beside(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    await fleet.ask(MIN_PROMPTS)
    monkeypatch.setattr(RetryBudget, "allows", lambda _self, _now: False)
    request, _ = await fleet.ask()
    assert not request.HasField("hedge_after_s")
    assert len(request.prefill_addresses) == 1


async def test_hedges_come_from_the_budget_and_the_late_one_is_blamed(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    spent: list[float] = []
    blamed: list[str] = []

    def spend(_self: RetryBudget, now: float) -> bool:
        spent.append(now)
        return True

    monkeypatch.setattr(RetryBudget, "spend", spend)
    monkeypatch.setattr(TrackRecord, "failed", lambda _self, worker, _now: blamed.append(worker[0]))
    fleet.reported = types_pb2.RequestReport(num_hedges=1)
    _, report = await fleet.ask()
    assert (report.num_hedges, report.num_hedges_won, len(spent), blamed) == (1, 0, 1, [])
    fleet.reported = types_pb2.RequestReport(num_hedges=1, num_hedges_won=1)
    fleet.blames, fleet.gave = [0], 1
    request, report = await fleet.ask()
    assert (report.num_hedges, report.num_hedges_won, len(spent)) == (1, 1, 2)
    assert blamed == [request.prefill_addresses[0]]


@pytest.mark.parametrize(
    ("said", "blames", "expected"),
    [
        ({"num_hedges": 1}, [0, 1], [0, 1]),  # both failed
        ({"num_hedges": 1}, [1], [1]),  # the one beside the first failed, and that one gave
        ({"num_retries": 1}, [], [0]),  # a decode worker of the release before
        ({"num_retries": 1}, [0], [0]),
    ],
)
async def test_whoever_failed_is_blamed_once(
    fleet: Fleet,
    monkeypatch: pytest.MonkeyPatch,
    said: dict[str, Any],
    blames: list[int],
    expected: list[int],
) -> None:
    failed: list[str] = []
    done_well: list[str] = []
    monkeypatch.setattr(TrackRecord, "failed", lambda _self, worker, _now: failed.append(worker[0]))
    monkeypatch.setattr(TrackRecord, "succeeded", lambda _self, worker, *_: done_well.append(worker[0]))
    fleet.reported, fleet.blames = types_pb2.RequestReport(**said), blames
    request, _ = await fleet.ask()
    assert failed == [request.prefill_addresses[index] for index in expected]
    assert not set(failed) & set(done_well), "it gave the first token, and failed after that"


async def test_nobody_is_blamed_who_was_not_to_be_asked(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    failed: list[str] = []
    monkeypatch.setattr(TrackRecord, "failed", lambda _self, worker, _now: failed.append(worker[0]))
    fleet.decode.spoil = lambda event: event.blamed_prefill_addresses.append("127.0.0.1:1")
    await fleet.ask()
    assert failed == []
