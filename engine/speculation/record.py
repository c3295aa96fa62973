"""Counts how many of one request's drafted tokens were right, and decides how long the next draft is. No clock is
involved."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

MEMORY = 0.8  # what a draft's counts weigh after the next one
PROBE_STEPS = 16  # times the requests of the step: so many steps after it stopped, a request tries one token again


@dataclass(slots=True)
class DraftRecord:
    num_drafted: int = 0  # tokens
    num_accepted: int = 0  # those that the model drew too
    hits: float = 1.4  # of late; a first guess is thought to be right seven times in ten
    trials: float = 2.0
    num_idle: int = 0  # steps since it last drafted
    token_ids: array[int] = field(default_factory=lambda: array("i"))  # of the request, as far as was looked at

    def count(self, num_drafted: int, num_accepted: int) -> None:
        """Counts one checked draft. Tokens behind the first wrong one do not count."""
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted
        self.hits = self.hits * MEMORY + num_accepted
        self.trials = self.trials * MEMORY + min(num_accepted + 1, num_drafted)
        self.num_idle = 0

    def next_length(
        self, num_requests: int, most: int, cost_of: Callable[[float], float], draft_cost: float = 0.0
    ) -> int:
        """How many tokens to draft, `most` at most, in a step of `num_requests` that all do the same.

        `cost_of`: a step's cost by its rows (`engine.speculation.step_cost`). To guess a token for each request costs
        `draft_cost` times what a step without drafts costs. One
        more token for each pays as long as it brings more for its cost than the step without.
        """
        chance = rate = self.hits / self.trials
        alone = cost_of(num_requests)
        length, expected, cost = 0, float(num_requests), alone
        while length < most:
            num_drafts = length + 1
            longer = cost_of(num_requests * (1 + num_drafts)) + draft_cost * alone * num_drafts
            if chance * num_requests * cost <= expected * (longer - cost):
                break
            length, cost = num_drafts, longer
            expected += chance * num_requests
            chance *= rate
        if length:
            return length
        self.num_idle += 1
        return min(most, int(self.num_idle >= PROBE_STEPS * num_requests))
