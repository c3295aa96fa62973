"""A prefill worker that is late in a simulation, and one asked beside it."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from common.config import SimulateSettings
from common.retry_budget import RetryBudget, hedge_budget
from common.traffic.requests import TrafficRequest
from common.types import SampledToken
from engine import messages as m
from simulation.clock import VirtualClock
from simulation.fleet import Fleet
from simulation.outcome import RequestOutcome
from simulation.prefill_leg import Mail, PrefillLeg
from simulation.scenario import fleet_options, scenarios


@dataclass(eq=False)
class Worker:
    """Notes what it is told, and when."""

    address: str
    clock: VirtualClock
    told: list[tuple[float, str]] = field(default_factory=list)

    def deliver(self, command: m.Command) -> None:
        self.told.append((round(self.clock.now, 3), type(command).__name__))


class Case:
    """One prompt, whose first two blocks its decode worker has. A message takes 1 ms, and a worker is late after
    100."""

    def __init__(self, budget: RetryBudget | None = None) -> None:
        self.clock = VirtualClock()
        self.decode, self.first, self.second = (Worker(name, self.clock) for name in ("d", "p1", "p2"))
        workers = {"p1": self.first, "p2": self.second}
        self.outcome = RequestOutcome(at=0.0, num_prompt_tokens=64, num_output_tokens=2)
        self.leg = PrefillLeg(
            "r",
            self.outcome,
            self.decode,  # type: ignore[arg-type]
            [*workers],
            workers.get,  # type: ignore[arg-type]
            Mail(self.clock, 0.001),
            hedge_after_s=0.1,
            hedges=budget or hedge_budget(),
            lends=True,
        )
        self.leg.start(
            m.AddRequest(
                request_id="r", prompt_token_ids=[1] * 64, sampling_params=None, first_block=2  # type: ignore[arg-type]
            )
        )  # fmt: skip

    def until(self, time: float) -> None:
        self.clock.at(time, lambda: None)
        while self.clock.now < time:
            self.clock.step()

    def gives(self, worker: Worker) -> None:
        self.leg.take_in(worker, m.BlocksPublished("r", [], [], "", 0.0))  # type: ignore[arg-type]

    def ends(self, worker: Worker) -> None:
        token = m.TokensGenerated(request_id="r", tokens=[SampledToken(7)], finish_reason=None)
        self.leg.take_in(worker, token)  # type: ignore[arg-type]


def test_the_one_that_gives_first_goes_on_and_the_other_is_released() -> None:
    case = Case()
    case.until(0.3)
    assert case.first.told == [(0.001, "AddRequest")]
    assert case.second.told == [(0.101, "AddRequest")]
    case.gives(case.second)
    case.gives(case.first)  # too late: nobody listens
    case.ends(case.second)
    case.until(0.4)
    assert case.first.told[1:] == [(0.301, "Release")]
    assert case.decode.told == [(0.301, "RemoteBlocksPublished"), (0.301, "RemoteFirstToken")]
    assert (case.outcome.num_hedges, case.outcome.is_hedge_won, case.outcome.prefill) == (1, True, "p2")
    assert case.leg.elapsed_s == pytest.approx(0.199)
    case.leg.release()
    case.until(0.5)
    assert case.second.told[1:] == [(0.401, "Release")]


def test_who_has_given_is_not_late_and_the_budget_bounds_hedges() -> None:
    case = Case()
    case.until(0.05)
    case.gives(case.first)
    case.until(0.3)
    assert (case.second.told, case.outcome.num_hedges, case.outcome.prefill) == ([], 0, "p1")
    broke = Case(RetryBudget(ratio=0.0, floor_per_s=0.0))
    broke.until(0.3)
    assert broke.second.told == []


def test_blocks_are_lent_to_one_worker_alone() -> None:
    case = Case()
    case.leg.take_in(case.first, m.LoanNeeded("r", 0, 2))  # type: ignore[arg-type]
    case.until(0.2)
    assert case.decode.told == [(0.001, "LendBlocks")]
    case.leg.take_in(case.second, m.LoanNeeded("r", 0, 2))  # type: ignore[arg-type]
    case.gives(case.second)
    case.until(0.3)
    assert case.second.told[1:] == [(0.201, "RemoteBlocksPublished")]
    assert (0.201, "EndLoan") in case.decode.told, "the borrower was released"


def test_a_refusal_is_followed_by_the_next_worker() -> None:
    case = Case()
    for worker in (case.first, case.second):
        case.leg.take_in(worker, m.RequestFailed("r", "RESOURCE_EXHAUSTED", "late"))  # type: ignore[arg-type]
        case.until(case.clock.now + 0.01)
    assert [name for _, name in case.second.told] == ["AddRequest"]
    assert [name for _, name in case.decode.told] == ["RemotePrefillFailed"], "once nobody is left"
    assert (case.outcome.num_retries, case.outcome.num_hedges) == (1, 0)


def test_if_one_of_two_fails_the_other_goes_on() -> None:
    case = Case()
    case.until(0.2)
    for worker in (case.first, case.second):
        case.leg.take_in(worker, m.RequestFailed("r", "INTERNAL", "broken"))  # type: ignore[arg-type]
        case.until(case.clock.now + 0.01)
        failed = [name for _, name in case.decode.told]
        assert failed == ([] if worker is case.first else ["RemotePrefillFailed"])


@pytest.mark.parametrize("hedge", [True, False])
def test_a_fleet_hedges_if_it_is_told_to(hedge: bool) -> None:
    """Chunks are so small that a long prompt takes much longer than the router thinks. All blocks are free in the
    end."""
    settings = SimulateSettings.model_validate(
        {
            "prefill": 2,
            "policy": "round_robin",
            "hedge_prefill": hedge,
            "announce": "end",
            "chunk_size": 32,
            "max_num_batched_tokens": 32,
            "block_size": 64,
        }
    )
    (scenario,) = scenarios(settings)
    fleet = Fleet(fleet_options(settings, scenario))
    outcome = fleet.run([TrafficRequest(at=0.0, runs=((1, 4000),), num_output_tokens=2)])
    assert fleet.check_integrity() == []
    (one,) = outcome.requests
    assert (one.failure, one.num_hedges, one.prefill) == ("", int(hedge), "prefill-1")
    assert outcome.summary({}).get("hedges", 0) == int(hedge)
