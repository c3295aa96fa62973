"""Requests that have not ended, and how fast those came that have."""

from __future__ import annotations

from router.running.known_requests import Ending, KnownRequests, Pace
from router.running.request import Attempt, Progress
from tests.router.test_answer import requests


class Ends:
    """What is told to end, and ends."""

    def abort(self, reason: str) -> bool:
        return True


def test_phases_of_a_request() -> None:
    now = 100.0
    known = KnownRequests(lambda: now, lambda: 5000.0)
    (request,) = requests(1)
    progress = Progress()
    known.began(request, progress, Ends())
    (told,) = known.running(9)
    assert (told.phase, told.decode_worker, told.ttft_ms) == ("queued", "", None)
    assert told.time == 5000.0 - (100.0 - request.arrived_at)

    progress.attempts.append(Attempt("new", "d:1", 99.5, prefill_worker="p:1"))
    (told,) = known.running(9)
    assert (told.phase, told.prefill_worker, told.decode_worker) == ("prefill", "p:1", "d:1")
    assert known.handoffs(1.0) == {}  # it began less than a second ago
    now = 101.0
    assert known.handoffs(1.0) == {("p:1", "d:1"): 1}

    progress.begins(now)
    progress.came(3, now)
    (told,) = known.running(9)
    assert (told.phase, told.output_tokens) == ("decode", 3)
    assert known.handoffs(1.0) == {}
    known.left(progress)
    known.left(progress)
    assert known.running(9) == []
    assert known.finished(9) == []

    known.began(request, progress, Ends())
    known.ended(request, progress, Ending("ok"))
    assert known.running(9) == []
    (told_last,) = known.finished(9)
    assert (told_last.request_id, told_last.output_tokens) == (request.request_id, 3)


def test_the_newest_requests_are_told() -> None:
    known, (request,) = KnownRequests(), requests(1)
    kept = [Progress(num_output_tokens=number) for number in range(5)]
    for progress in kept:
        known.began(request, progress, Ends())
    assert [one.output_tokens for one in known.running(2)] == [4, 3]


def test_paces_are_of_whole_answers_of_late() -> None:
    now = 50.0
    known = KnownRequests(lambda: now)
    (request,) = requests(1)
    begun = request.arrived_at

    def add(num_tokens: int, status: str = "ok") -> None:
        progress = Progress(first_token_at=begun + 0.5, last_token_at=begun + 1.1, num_output_tokens=num_tokens)
        known.ended(request, progress, Ending(status))

    add(4)
    now = 60.0
    add(4)
    add(1)
    add(4, "cancelled")
    now = 65.0
    assert [(round(one.ttft_ms), one.tpot_ms and round(one.tpot_ms)) for one in known.paces(10.0)] == [
        (500, None),
        (500, 200),
    ]
    assert len(known.paces(100.0)) == 3
    assert isinstance(known.paces(100.0)[0], Pace)
