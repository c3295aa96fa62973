"""What one step may take of a request."""

from __future__ import annotations

import math

import pytest

from common.batch_time import StepShape
from engine.scheduling.step_budget import LEAST_CHUNK, StepBudget, TimeBudget
from tests.support.linear_time import linear_time


def test_what_is_left_bounds_what_a_request_gets() -> None:
    budget = StepBudget(10, chunk_size=6)
    assert [budget.chunk(num_missing) for num_missing in (1, 6, 7)] == [1, 6, 6]
    assert budget.fitting(20) == 10, "drafts are no chunk of a prompt"
    budget.take(6)
    assert (budget.chunk(7), budget.fitting(7), budget.is_spent) == (4, 4, False)
    with pytest.raises(ValueError, match="5 tokens for a step that has 4 left"):
        budget.take(5)
    budget.take(4)
    assert (budget.chunk(1), budget.fitting(1), budget.is_spent) == (0, 0, True)


def test_time_bounds_chunks_and_drafts() -> None:
    """A step takes 10 ms and one more for each token, so 50 ms are 40 tokens, 8 of them decodes."""
    decodes = StepShape(num_decodes=8, decode_context=80, longest_context=10, num_head_rows=8)
    budget = TimeBudget(1000, chunk_size=100, time=linear_time(0.010, 0.001), decodes=decodes, within=0.0505)
    assert (budget.chunk(500), budget.chunk(20), budget.chunk(500, past=64)) == (32, 20, 32)
    assert budget.fitting(40) == 20, "half and half again"
    budget.take(14)
    assert budget.seconds == pytest.approx(0.032)
    assert (budget.chunk(500), budget.is_spent) == (18, False)
    budget.take_drafted(4)
    assert budget.chunk(14) == 14
    assert (budget.chunk(LEAST_CHUNK), budget.is_spent) == (0, True), "fewer are not worth a row"
    assert budget.chunk(1) == 1, "a row of one token is a decode's"
    budget.within = math.inf
    assert budget.chunk(500) == 100


def test_all_prompts_together_are_bounded_too() -> None:
    time = linear_time(0.010, 0.001)
    budget = TimeBudget(1000, chunk_size=100, time=time, decodes=StepShape(), within=math.inf, num_of_prompts=120)
    budget.take(100)
    assert (budget.chunk(500), budget.chunk(1)) == (20, 1)
    budget.take(20)
    assert (budget.chunk(500), budget.chunk(1), budget.fitting(5)) == (0, 1, 5)


def test_a_step_of_few_tokens_takes_chunks_of_few() -> None:
    budget = TimeBudget(6, chunk_size=4, time=linear_time(0.010, 0.001), decodes=StepShape(), within=1.0)
    assert (budget.chunk(9), budget.is_spent) == (4, False)
