"""In how many seconds the planner answers a jump in load. The clock is a number that the test counts up.

A fleet of as many workers as the steady load needs is asked for three times as much from one second to the next. What
the planner sees follows: requests come at random, prompts that no worker has computed yet wait, and answers last a
while. No worker is added, whatever is decided: what is measured is the decision, not its effect.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass
from functools import cache

import pytest

from common.types import WorkerRole
from router.autoscaler.model_rules import LatencyGoal, ModelRules
from router.autoscaler.planner import Bounds, Planner, PlannerOptions
from router.autoscaler.roles import RoleOptions, RolePlanner
from router.autoscaler.rules import TargetRules, Targets
from router.autoscaler.signals import FleetSignals, MovableWorker, RoleSignals
from simulation.rough_fleet import Hardware
from tests.router.autoscaler.test_forecast import poisson

HARDWARE = Hardware()
GOAL = LatencyGoal(ttft_s=10.0, tpot_s=0.035, share=0.9, startup_s=30.0)
PREFILL, DECODE, BOTH = WorkerRole.PREFILL, WorkerRole.DECODE, WorkerRole.BOTH
PROMPT, ANSWER = 4000, 300  # tokens of each request
ANSWER_S = 9.0  # an answer's time on a decode worker
STEADY_S, AFTER_S = 300, 90
SEEDS = range(3)


@dataclass(slots=True)
class Reaction:
    """Seconds from the jump; None: not within AFTER_S."""

    pods_s: int | None = None  # until more workers are asked for
    enough_s: int | None = None  # until as many are asked for as the new load keeps busy
    shift_s: int | None = None  # until a role is shifted


@cache
def react(rate: float, jump: float, seed: int, *, roles: str = "PDDD", sees_queue: bool = True) -> Reaction:
    """`rate` requests a second, then `jump` times as many. `roles`: what each worker takes, of those whose roles move.
    Without `sees_queue` nobody tells of prompts that wait and requests that run: the forecast is alone."""
    workers = [
        MovableWorker(address=f"w{n}", role=PREFILL if letter == "P" else DECODE) for n, letter in enumerate(roles)
    ]
    num = {"P": roles.count("P"), "D": roles.count("D")}
    options = PlannerOptions(both=Bounds(1, 40), scale_up_delay_s=3.0, scale_down_delay_s=120.0)
    planner = Planner(options, ModelRules(GOAL, TargetRules(Targets())))
    role_planner = RolePlanner(RoleOptions(interval_s=30.0, delay_s=3.0))
    draw, reaction = random.Random(seed), Reaction()
    arrived, queued = 0, 0.0
    running: deque[tuple[int, int]] = deque()  # when, and how many came
    needed = PROMPT * rate * jump * HARDWARE.prompt_s(PROMPT) / PROMPT
    steady = 0
    for now in range(STEADY_S + AFTER_S):
        came = poisson(draw, rate * (1 if now < STEADY_S else jump))
        arrived += came
        queued = max(0.0, queued + came * PROMPT - num["P"] * PROMPT / HARDWARE.prompt_s(PROMPT))
        running.append((now, came))
        while running[0][0] <= now - ANSWER_S:
            running.popleft()
        seen = FleetSignals(
            prefill=RoleSignals(num_ready=num["P"], queued_tokens=int(queued) * sees_queue, times=(HARDWARE,)),
            decode=RoleSignals(
                num_ready=num["D"], num_requests=sum(n for _, n in running) * sees_queue, times=(HARDWARE,)
            ),
            both=RoleSignals(num_ready=len(workers)),
            arrived_requests=float(arrived),
            arrived_tokens=float(arrived * PROMPT),
            answered_tokens=float(arrived * ANSWER),
        )
        decisions = planner.step(float(now), seen)
        shift = role_planner.step(float(now), decisions, seen, workers)
        if now < STEADY_S:
            steady = decisions[BOTH].desired
            continue
        after = now - STEADY_S
        if reaction.pods_s is None and decisions[BOTH].desired > max(steady, len(workers)):
            reaction.pods_s = after
        if reaction.enough_s is None and decisions[PREFILL].desired >= needed:
            reaction.enough_s = after
        if reaction.shift_s is None and shift is not None:
            reaction.shift_s = after
    return reaction


@pytest.mark.parametrize(
    ("rate", "jump", "roles", "within_s"),
    [(1.0, 3.0, "PDDD", 30), (1.0, 4.0, "PDDD", 20), (1.5, 4.0, "PDDDDD", 20), (4.0, 3.0, "PPPDDDD", 15)],
)
def test_a_jump_is_answered_in_seconds(rate: float, jump: float, roles: str, within_s: int) -> None:
    """The more requests, the sooner a jump is told from noise. `within_s` holds for the slowest of all seeds: as many
    prefill workers as the new load keeps busy are wanted, and a decode worker is told to take prompts."""
    for seed in SEEDS:
        found = react(rate, jump, seed, roles=roles)
        assert found.enough_s is not None, found
        assert found.shift_s is not None, found
        assert 0 < found.enough_s <= within_s, found
        assert 0 < found.shift_s <= within_s, found


def test_a_role_moves_before_pods_are_asked_for() -> None:
    """While the fleet as a whole is large enough."""
    for seed in SEEDS:
        found = react(1.0, 3.0, seed)
        assert found.shift_s is not None, found
        assert found.pods_s is None or found.shift_s < found.pods_s, found


def test_the_fast_loop_is_ahead_of_the_forecast() -> None:
    """What waits and runs now says sooner than arrivals that there is more to do."""
    fast, slow = (
        sum(react(1.0, 3.0, seed, sees_queue=sees).enough_s or AFTER_S for seed in SEEDS) for sees in (True, False)
    )
    assert fast < slow
