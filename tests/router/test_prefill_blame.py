"""Which prefill workers are blamed, by what a decode worker says."""

from __future__ import annotations

from typing import Any

import pytest

from common.types import WorkerRole
from protos.baton.v1 import decode_pb2, types_pb2
from router.fleet.endpoint import Endpoint
from router.running.decode_events import PrefillBlame

PREFILL = [Endpoint(worker_id=name, role=WorkerRole.PREFILL, address=name) for name in "ABCD"]


def event(names: str = "", refused: str = "", **counts: Any) -> decode_pb2.DecodeEvent:
    report = types_pb2.RequestReport(**counts)
    return decode_pb2.DecodeEvent(
        report=report, blamed_prefill_addresses=[*names], refused_prefill_addresses=[*refused]
    )


@pytest.mark.parametrize(
    ("said", "blamed"),
    [
        # A is late and B is asked beside it; A gives a block, so B is let go; then A fails, C fails, and D gives.
        (event("AC", num_hedges=1, num_retries=2), "AC"),
        (event("A", num_hedges=1, num_hedges_won=1), "A"),
        (event("B", num_hedges=1), "B"),  # the one asked beside A failed first, and A gave
        # A decode worker of the release before gives counts and no names.
        (event(num_retries=2), "AB"),
        (event(num_hedges=1, num_hedges_won=1), "A"),  # it was late
        (event(num_hedges=2, num_hedges_won=2), "A"),
        (event(num_hedges=1, num_hedges_won=1, num_retries=2), "AB"),
        (event(num_hedges=1), ""),
        (event(), ""),
        # Who refuses did nothing wrong, and counts say nothing then.
        (event(refused="A", num_retries=1), ""),
        (event("B", refused="A", num_retries=2), "B"),
        (event(refused="X", num_retries=1), "A"),  # nobody that was to be asked
    ],
)
def test_who_is_blamed(said: decode_pb2.DecodeEvent, blamed: str) -> None:
    blame = PrefillBlame(PREFILL)
    assert "".join(one.address for one in blame.told(said)) == blamed
    known = {*blamed, *said.refused_prefill_addresses}
    assert [one.address for one in PREFILL if one in blame] == sorted(known & {*"ABCD"})
    assert blame.told(said) == []  # the next report says the same


def test_more_are_blamed_as_more_fail() -> None:
    blame = PrefillBlame(PREFILL)
    said = [event(), event("A"), event("AC", num_retries=2)]
    assert [[one.address for one in blame.told(one)] for one in said] == [[], ["A"], ["C"]]
