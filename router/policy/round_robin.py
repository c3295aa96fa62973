"""Each worker in turn, whatever its load: for workers and requests that are all alike, and to compare with."""

from __future__ import annotations

from collections.abc import Sequence

from router.policy.base import Candidate, Ranked, Ranking, RoutingRequest


class RoundRobin(Ranking):
    def rank(self, request: RoutingRequest, candidates: Sequence[Candidate]) -> list[Ranked]:  # noqa: ARG002
        return [Ranked(one, "in turn") for one in candidates]
