"""The decisions that are kept for people who ask why."""

from __future__ import annotations

from common.types import WorkerRole
from router.fleet.endpoint import Endpoint
from router.policy.base import Reasons, RoutingDecision
from router.running.decisions import MAX_DECISIONS, MAX_REASON_CHARS, MAX_REASONS, Decisions
from tests.router.test_answer import requests

D = Endpoint(worker_id="d", role=WorkerRole.DECODE, address="d")
P = Endpoint(worker_id="p", role=WorkerRole.PREFILL, address="p")


def test_reasons_are_made_when_somebody_asks() -> None:
    num_made = 0

    def why() -> str:
        nonlocal num_made
        num_made += 1
        return f"line {num_made}"

    decisions = Decisions(lambda: 7.0)
    (request,) = requests(1)
    for cached in range(3):
        decided = RoutingDecision(decode=D, prefill=(P,), reasons=Reasons((), [why]), num_cached_tokens=cached)
        decisions.add(request, decided, "new")
    assert num_made == 0
    (last,) = decisions.latest(1)
    assert num_made == 1
    assert (last.time, last.cached_tokens, last.decode_worker, last.prefill_workers) == (7.0, 2, "d", ("p",))
    assert last.reasons == ("line 1",)


def test_what_is_kept_is_bounded() -> None:
    decisions = Decisions()
    (request,) = requests(1)
    passed_over = [(f"w{number}", "x" * 2 * MAX_REASON_CHARS) for number in range(2 * MAX_REASONS)]
    decided = RoutingDecision(decode=D, prefill=(), reasons=Reasons(passed_over, [lambda: "decode by d"]))
    for _ in range(MAX_DECISIONS + 1):
        decisions.add(request, decided, "new")
    found = decisions.latest(2 * MAX_DECISIONS)
    assert len(found) == MAX_DECISIONS
    assert found[0].reasons[-1] == "decode by d"
    assert [len(line) for line in found[0].reasons[:-1]] == [MAX_REASON_CHARS] * (MAX_REASONS - 1)
    assert found[0].reasons[0].startswith(f"w{MAX_REASONS + 1}: ")
    assert len(decided.reasons.lines()) == 2 * MAX_REASONS + 1
