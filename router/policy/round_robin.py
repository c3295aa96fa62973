"""Each worker in turn, whatever its load: for workers and requests that are all alike, and to compare with."""

from __future__ import annotations

from collections.abc import Sequence

from router.fleet.endpoint import Endpoint
from router.policy.base import RankingPolicy


class RoundRobin(RankingPolicy):
    def rank(self, endpoints: Sequence[Endpoint]) -> list[Endpoint]:
        return list(endpoints)

    def reason(self, endpoint: Endpoint) -> str:  # noqa: ARG002 (nothing of the worker counts)
        return "next in turn"
