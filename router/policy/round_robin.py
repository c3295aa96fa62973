"""Each worker in turn, whatever its load: for workers and requests that are all alike, and to compare with."""

from __future__ import annotations

from typing import ClassVar

from router.policy.base import NUM_RANKED, Candidates, Ranked, Ranking, RoutingRequest


class RoundRobin(Ranking):
    name: ClassVar[str] = "round_robin"
    about: ClassVar[str] = "each in turn"

    def rank(self, request: RoutingRequest, candidates: Candidates) -> Ranked:  # noqa: ARG002
        return Ranked(candidates[:NUM_RANKED], lambda _: "in turn")
