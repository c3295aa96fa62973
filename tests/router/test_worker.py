"""What a router knows of one worker, told as an endpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from msgspec.structs import replace

from common.types import LOAD_INTERVAL_S, SLACKS_S, WorkerLoad, WorkerRole, WorkerState, request_tag
from protos.baton.v1 import worker_pb2
from router.fleet.endpoint import Endpoint
from router.fleet.worker import Sent, WorkerRecord
from tests.router.test_answer import requests


def info(epoch: str = "e", model: str = "m") -> worker_pb2.WorkerInfo:
    return worker_pb2.WorkerInfo(worker_id="w", role=worker_pb2.WORKER_ROLE_DECODE, epoch=epoch, model=model)


def report(worker: WorkerRecord, **load: Any) -> None:
    worker.load = WorkerLoad(**load)


def introduce(worker: WorkerRecord, epoch: str) -> None:
    worker.info = info(epoch)


def lose(worker: WorkerRecord) -> None:
    worker.state = WorkerState.UNREACHABLE


@pytest.fixture
async def worker() -> WorkerRecord:
    made = WorkerRecord("127.0.0.1:1", WorkerRole.DECODE, grpc.aio.insecure_channel("127.0.0.1:1"), 0)
    made.info, made.state = info(), WorkerState.READY
    made.send("first", Sent(0.0, 3, num_context=30))
    return made


NONE_UNREPORTED: dict[str, object] = {"num_unreported": 0, "num_unreported_tokens": 0, "num_unreported_context": 0}
CHANGES: list[tuple[Callable[[WorkerRecord], object], dict[str, object]]] = [
    (lambda one: report(one, num_requests_waiting=2), {"load": WorkerLoad(num_requests_waiting=2)}),
    (lambda one: introduce(one, "e2"), {"epoch": "e2"}),
    (lose, {"state": WorkerState.UNREACHABLE}),
    (
        lambda one: one.send("second", Sent(1.0, 5, num_context=50)),
        {"num_unreported": 2, "num_unreported_tokens": 8, "num_unreported_context": 80},
    ),
    (lambda one: one.reported("first"), NONE_UNREPORTED),
    (lambda one: one.reported("another"), {}),
]


@pytest.mark.parametrize(("change", "expected"), CHANGES)
async def test_an_endpoint_is_made_anew_if_something_has_changed(
    worker: WorkerRecord, change: Callable[[WorkerRecord], object], expected: dict[str, object]
) -> None:
    before = worker.endpoint()
    assert worker.endpoint() is before
    assert (before.num_unreported, before.num_unreported_tokens) == (1, 3)
    change(worker)
    assert worker.endpoint() == replace(before, **expected)
    assert (worker.endpoint() is before) is (not expected)


async def test_reasons_against_a_worker_are_told(worker: WorkerRecord) -> None:
    for excluded, suspended in (("", "slow"), ("other", "slow"), ("other", ""), ("", "")):
        told: Endpoint = worker.endpoint(excluded, suspended)
        assert (told.excluded, told.suspended) == (excluded, suspended)


async def test_requests_that_were_reported_and_then_end_are_counted_once(worker: WorkerRecord) -> None:
    for _ in range(2):
        worker.reported("first")
        assert worker.endpoint().num_unreported_tokens == 0


async def test_a_request_that_a_report_counts_is_counted_once(worker: WorkerRecord) -> None:
    """`worker` has one request, sent at 0 s without a tag."""
    for key, at in (("a", 9.99), ("b", 9.99), ("b again", 9.99), ("by another version", 9.99), ("old", 9.0)):
        worker.send(key, Sent(at, 10, tag=None if " v" in key else request_tag(key[0])))
    worker.take_load(WorkerLoad(), 9.995, [request_tag("b"), request_tag("of another router")])
    # `first` and `old` were sent long enough ago.
    assert list(worker.sent) == ["a", "b again", "by another version"]
    assert worker.endpoint().num_unreported_tokens == 30
    worker.take_load(WorkerLoad(), 9.996, [request_tag("a")])
    assert list(worker.sent) == ["b again", "by another version"]
    worker.take_load(WorkerLoad(), 9.99 + 2 * LOAD_INTERVAL_S)
    assert (worker.endpoint().num_unreported, worker.endpoint().num_unreported_tokens) == (0, 0)


async def test_tokens_that_are_not_reported_are_told_by_slack(worker: WorkerRecord) -> None:
    """Requests without a target, and those that are late in any case, go after all that can be in time."""
    assert worker.endpoint().unreported_by_slack == (0,) * len(SLACKS_S)
    for key, slack_s in (("soon", 0.2), ("later", 3.0), ("in a day", 86_400.0), ("any time", None), ("late", -0.1)):
        worker.send(key, Sent(1.0, 10, slack_s=slack_s))
    by_slack = dict(zip(SLACKS_S, worker.endpoint().unreported_by_slack, strict=True))
    assert (by_slack[0.125], by_slack[0.25], by_slack[2.0], by_slack[4.0], by_slack[32.0]) == (0, 10, 10, 20, 20)
    assert worker.endpoint().num_unreported_tokens == 53
    before = worker.endpoint()
    worker.reported("soon")
    worker.send("another", Sent(1.0, 10, slack_s=3.0))
    assert worker.endpoint() is not before, "as many requests with as many tokens, but other ones"
    for sent in list(worker.sent):
        worker.reported(sent)
    assert (worker.endpoint().num_unreported_tokens, worker.endpoint().unreported_by_slack) == (0, (0,) * len(SLACKS_S))


async def test_whether_a_worker_goes_with_the_model_is_asked_again_if_either_changes(worker: WorkerRecord) -> None:
    (request,) = requests(1)
    model = request.model
    assert worker.excluded(None) == ""
    assert "serves model 'm'" in worker.excluded(model)
    worker.info = info(model=model.limits.model)
    worker.info.fingerprint = model.fingerprint
    assert worker.excluded(model) == ""
    assert "another kind" in worker.excluded(dataclasses.replace(model, fingerprint="other"))
    assert worker.excluded(model) == ""
