"""What one step may take of a request."""

from __future__ import annotations

import pytest

from engine.scheduling.step_budget import StepBudget


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
