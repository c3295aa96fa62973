"""Runs of steps whose times grow evenly, beside the plain way of going from step to step."""

from __future__ import annotations

import random

import pytest

from simulation.step_times import Run


@pytest.mark.parametrize("seed", range(20))
def test_a_run_is_what_its_steps_are(seed: int) -> None:
    draw = random.Random(seed)
    run = Run(draw.uniform(0, 9), draw.randrange(1, 600), draw.uniform(1e-4, 0.1), draw.choice([0, 1e-7, 1e-5]), 0.0)
    ends = [run.start + run.seconds(num) for num in range(run.num_steps + 1)]
    assert run.end == ends[-1]
    for _ in range(50):
        at = draw.uniform(run.start, run.end)
        assert run.num_done(at) == sum(end <= at for end in ends) - 1
        assert run.step_end(at) == min(end for end in ends if end >= at)
        told, until = draw.uniform(run.start - 0.1, at), draw.uniform(at, run.end)
        expected = told
        while (due := next((end for end in ends if end >= expected + 0.05), until)) < until:
            expected = due
        assert run.last_turn(told, 0.05, until) == expected
