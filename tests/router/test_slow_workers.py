"""A worker that gives its tokens slowly, or computes prompts slowly, gets no more requests: from its events to the
decision, on a clock that only workers and clients of these tests move on."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest

from common.types import WorkerRole, WorkerState
from protos.baton.v1 import decode_pb2, types_pb2, worker_pb2
from router.fleet import registry as registry_module
from router.fleet.decode_call import Arrived
from router.fleet.registry import Registry
from router.fleet.track_record import MIN_ANSWERS, SLOW_S
from router.policy.registry import create_policy
from router.running.decisions import Decisions
from router.running.dispatch import Dispatcher
from router.running.prefill_times import MIN_LIKE
from router.running.request import Progress, Siblings
from router.running.routes import Routes
from tests.router.test_answer import requests

WORKERS = tuple(f"127.0.0.1:{number}" for number in range(1, 5))
SLOW = WORKERS[-1]
PREFILL = tuple(f"127.0.0.1:{number}" for number in range(5, 9))
NUM_TOKENS = 12


class Fleet:
    """Four decode workers, and those of `prefill`. By address: `pace_s`, a worker's time between tokens, `prompt_s`,
    its time for a prompt, and `client_s`, what a client of its answers takes for each piece."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, prefill: tuple[str, ...] = ()) -> None:
        self.now = 1000.0
        self.pace_s = dict.fromkeys(WORKERS, 0.03)
        self.prompt_s = dict.fromkeys(prefill, 0.1)
        self.client_s = dict.fromkeys(WORKERS, 0.0)
        monkeypatch.setattr(registry_module, "time", SimpleNamespace(monotonic=self.clock))
        (request,) = requests(1)
        params = replace(request.sampling_params, max_tokens=NUM_TOKENS)
        self.request = replace(request, prompt_token_ids=[1] * 32, sampling_params=params)
        self.decisions = Decisions()
        registry = Registry(prefill, WORKERS)
        registry.models = {"tiny": self.request.model}
        for address in (*WORKERS, *prefill):
            worker = registry._workers[address]
            worker.state = WorkerState.READY
            worker.info = worker_pb2.WorkerInfo(
                worker_id=address,
                role=worker_pb2.WORKER_ROLE_PREFILL if address in prefill else worker_pb2.WORKER_ROLE_DECODE,
                epoch="e",
                model=self.request.model.limits.model,
                fingerprint=self.request.model.fingerprint,
                max_model_len=self.request.model.limits.max_model_len,
                block_size=16,
            )
            worker.changed()
        assert [one.role for one in registry.endpoints()] == [WorkerRole.DECODE] * 4 + [WorkerRole.PREFILL] * len(
            prefill
        )
        assert not any(one.excluded for one in registry.endpoints())
        self.registry = registry
        routes = Routes(registry, create_policy("round_robin"), self.decisions, self.clock)
        self.dispatcher = Dispatcher(registry, routes, clock=self.clock)
        self.dispatcher._attempts._streams = self  # type: ignore[assignment]  # which opens calls

    def clock(self) -> float:
        return self.now

    def call(
        self, _channel: object, incarnation: tuple[str, str], request: decode_pb2.DecodeRequest, _timeout_s: float
    ) -> Call:
        return Call(self, incarnation[0], *request.prefill_addresses[:1])

    async def ask(self) -> str:
        """One request; the worker that computed its prompt."""
        progress, num_tokens = Progress(), 0
        request = replace(self.request, siblings=Siblings())  # else it goes where the one before went
        async for new in self.dispatcher.run(request, progress):
            num_tokens += len(new.tokens)
            self.now += self.client_s[progress.report.decode_worker]
        assert num_tokens == NUM_TOKENS
        return progress.report.prefill_worker or progress.report.decode_worker

    async def ask_often(self, num: int) -> list[str]:
        return [await self.ask() for _ in range(num)]

    def states(self) -> list[str]:
        return [self.registry.track.state((address, "e"), self.now) for address in (*WORKERS, *self.prompt_s)]


class Call:
    """One answer: an event with a report, tokens of which there is nothing else to say, and the last event."""

    def __init__(self, fleet: Fleet, address: str, prefill_address: str = "") -> None:
        self._fleet = fleet
        self._address = address
        self._prefill_address = prefill_address
        self._num = 0

    def __aiter__(self) -> Call:
        return self

    async def __anext__(self) -> Arrived:
        self._fleet.now += self._fleet.pace_s[self._address]
        self._num += 1
        if 1 < self._num < NUM_TOKENS:
            return [1]
        report = types_pb2.RequestReport(prefill_worker=self._prefill_address)
        report.timings.prefill_queue_ms = 1.0 if self._prefill_address else 0.0
        report.timings.prefill_ms = 1000 * self._fleet.prompt_s.get(self._prefill_address, 0.0)
        event = decode_pb2.DecodeEvent(tokens=[types_pb2.SampledToken(token_id=1)], report=report)
        if self._num == NUM_TOKENS:
            event.finish_reason = types_pb2.FINISH_REASON_LENGTH
        return event

    async def aclose(self) -> None:
        pass


@pytest.fixture
async def fleet(monkeypatch: pytest.MonkeyPatch) -> Fleet:
    return Fleet(monkeypatch)


async def test_a_slow_worker_is_left_alone_for_a_while(fleet: Fleet) -> None:
    fleet.pace_s[SLOW] = 0.3
    assert sorted(await fleet.ask_often(4)) == sorted(WORKERS), "a few answers say nothing"
    await fleet.ask_often(4 * MIN_ANSWERS)
    assert fleet.states() == ["closed"] * 3 + ["slow"]
    until = fleet.now + SLOW_S
    assert SLOW not in await fleet.ask_often(8)
    (last,) = fleet.decisions.latest(1)
    (reason,) = [reason for reason in last.reasons if reason.startswith(SLOW)]
    assert "slower than others" in reason
    fleet.now = until
    fleet.pace_s[SLOW] = 0.03
    assert SLOW in await fleet.ask_often(4)
    await fleet.ask_often(4 * MIN_ANSWERS)
    assert fleet.states() == ["closed"] * 4


async def test_a_prefill_worker_that_is_slow_is_left_alone_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet(monkeypatch, PREFILL)
    slow = PREFILL[-1]
    fleet.prompt_s[slow] = 1.0
    assert sorted(await fleet.ask_often(4)) == sorted(PREFILL), "a few prompts say nothing"
    await fleet.ask_often(4 * MIN_ANSWERS + MIN_LIKE)
    assert fleet.states() == ["closed"] * 7 + ["slow"]
    until = fleet.now + SLOW_S
    assert slow not in await fleet.ask_often(8)
    fleet.now, fleet.prompt_s[slow] = until, 0.1
    assert slow in await fleet.ask_often(4)
    await fleet.ask_often(4 * MIN_ANSWERS)
    assert fleet.states() == ["closed"] * 8


async def test_who_is_given_the_long_prompts_is_not_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet(monkeypatch, PREFILL)
    short, long = replace(fleet.request, prompt_token_ids=[1] * 20), replace(fleet.request, prompt_token_ids=[1] * 200)
    theirs = set()
    for number in range(16 * MIN_ANSWERS):  # round robin: each fourth prompt goes to the same worker
        fleet.request = long if number % len(PREFILL) == 3 else short
        fleet.prompt_s = dict.fromkeys(PREFILL, 6.0 if fleet.request is long else 0.3)
        address = await fleet.ask()
        if fleet.request is long:
            theirs.add(address)
    assert len(theirs) == 1
    assert fleet.states() == ["closed"] * 8


async def test_a_client_that_reads_slowly_is_not_its_workers_fault(fleet: Fleet) -> None:
    fleet.client_s[SLOW] = 1.0  # a tenth of the time for which a slow worker is left alone
    assert (await fleet.ask_often(8 * MIN_ANSWERS)).count(SLOW) == 2 * MIN_ANSWERS
    assert fleet.states() == ["closed"] * 4


async def test_each_decision_is_a_line_of_the_debug_log(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "router.running.routes"):
        address = await fleet.ask()
    (line,) = [record for record in caplog.records if record.getMessage() == "routed"]
    assert line.levelno == logging.DEBUG
    assert line.__dict__["request_id"] == fleet.request.request_id
    reasons = line.__dict__["reasons"]
    assert any(reason.startswith(f"decode by {address}") for reason in reasons)
    assert list(fleet.decisions.latest(1)[0].reasons) == list(reasons)
