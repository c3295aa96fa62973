"""How much of a request one step may compute: the one place that answers, whatever the answer is measured in. Pure."""

from __future__ import annotations


class StepBudget:
    """What a step may still take, in tokens. It is never exceeded."""

    def __init__(self, num_tokens: int, chunk_size: int) -> None:
        """`chunk_size`: most tokens of one prompt."""
        self._num_left = num_tokens
        self._chunk_size = chunk_size

    @property
    def is_spent(self) -> bool:
        return self._num_left <= 0

    def chunk(self, num_missing: int) -> int:
        """How many of a request's missing tokens this step may take; 0 if the budget is spent."""
        return min(num_missing, self._chunk_size, self._num_left)

    def fitting(self, num_drafted: int) -> int:
        """How many of so many drafted tokens of one request this step may check."""
        return min(num_drafted, self._num_left)

    def take(self, num_tokens: int) -> None:
        """Raises `ValueError` if that is more than is left."""
        if num_tokens > self._num_left:
            raise ValueError(f"{num_tokens} tokens for a step that has {self._num_left} left")
        self._num_left -= num_tokens
