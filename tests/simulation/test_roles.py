"""Simulated fleets whose roles move."""

from __future__ import annotations

import itertools

import pytest

from bench.moving_roles import rows
from common.config import SimulateSettings
from common.errors import ConfigError
from common.types import WorkerRole
from simulation.scenario import run

TIMES = "xeon-135m"  # of few requests a second


def test_roles_follow_the_load_and_no_worker_is_added() -> None:
    given = {"prefill": 1, "decode": 2, "move_roles": True, "role_delay": 1.0, "role_interval": 5.0, "leap": True}
    busy = {"requests": 25, "rate": 4, "prompt_tokens": 2000, "output_tokens": 4, "target_queued_tokens": 2000}
    (result,) = run(SimulateSettings.model_validate({**given, **busy, "times": TIMES, "max_model_len": 4096}))
    outcome = result.outcome
    assert not outcome.failures()
    assert outcome.shifts
    (at, first), *_ = outcome.shifts
    assert (first.words, at >= 1.0) == ("decode -> prefill", True)
    assert all(
        later - earlier >= 5.0 for (earlier, _), (later, _) in zip(outcome.shifts, outcome.shifts[1:], strict=False)
    )
    assert set(outcome.paid_s) == {WorkerRole.BOTH}
    assert outcome.paid_s[WorkerRole.BOTH] == pytest.approx(3 * outcome.seconds)
    # A prompt that came later was computed by the worker that had been one for requests.
    assert {one.prefill for one in outcome.requests if one.at > at} >= {first.worker.address}


def test_pods_come_second() -> None:
    """The fleet is short as a whole, so it grows by workers of both roles."""
    given = {"prefill": 1, "decode": 1, "move_roles": True, "autoscale": True, "startup": 2.0, "leap": True}
    busy = {"requests": 30, "rate": 4, "prompt_tokens": 2000, "output_tokens": 4, "target_queued_tokens": 2000}
    limits = {"both_max": 4, "scale_up_delay": 0.0}
    (result,) = run(SimulateSettings.model_validate({**given, **busy, **limits, "times": TIMES, "max_model_len": 4096}))
    outcome = result.outcome
    assert not outcome.failures()
    assert max(wanted[WorkerRole.BOTH] for _, wanted in outcome.scaled) == 4
    assert outcome.paid_s[WorkerRole.BOTH] > 2 * outcome.seconds


def test_all_workers_are_alike() -> None:
    with pytest.raises(ConfigError) as raised:
        run(SimulateSettings.model_validate({"move_roles": True, "decode_times": TIMES}))
    assert raised.value.message.startswith("decode_times")


@pytest.mark.slow
def test_a_day_whose_mix_changes_has_more_good_answers_if_roles_move() -> None:
    """More than fleets whose workers keep one role each have on average: which of them is the best, nobody knows
    before the day."""
    first, second, moving = itertools.islice(rows(3, TIMES, 60.0, 4000.0, 25.0, load=1.0), 3)
    assert [first.fleet, second.fleet, moving.fleet] == ["1P + 2D", "2P + 1D", "moving"]
    assert moving.num_shifts > 1
    assert moving.day > (first.day + second.day) / 2
