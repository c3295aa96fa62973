"""The less loaded of two workers that are drawn by lot (Mitzenmacher, "The Power of Two Choices in Randomized Load
Balancing", 2001). Many routers that see the same loads, a little late, do not all take the same worker.
"""

from __future__ import annotations

import hashlib
from typing import ClassVar

from router.policy.base import NUM_RANKED, Candidates, Ranked, Ranking, RoutingRequest
from router.policy.least_load import candidate_order, load_in_words


class PowerOfTwo(Ranking):
    name: ClassVar[str] = "power_of_two"
    about: ClassVar[str] = "the less loaded of two drawn by lot"

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self._num_drawn = 0

    def rank(self, request: RoutingRequest, candidates: Candidates) -> Ranked:  # noqa: ARG002
        """The two that are drawn, the better one first, then all others by load."""
        num = len(candidates)
        numbers = [self._draw(num)] if num else []
        if num > 1:
            second = self._draw(num - 1)  # of those that are left
            numbers.append(second + (second >= numbers[0]))
        drawn = sorted([candidates[number] for number in numbers], key=candidate_order)
        rest = [
            one for one in candidates.least_loaded(NUM_RANKED) if all(one.endpoint is not d.endpoint for d in drawn)
        ]
        return Ranked(drawn + rest, lambda one: f"drawn, {load_in_words(one)}" if one in drawn else load_in_words(one))

    def _draw(self, num: int) -> int:
        self._num_drawn += 1
        digest = hashlib.blake2b(f"{self._seed}/{self._num_drawn}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") % num
