"""Requests of one session go to one worker, as long as it is not overloaded.

By rendezvous hashing (Thaler and Ravishankar, 1998): each session orders all workers by a hash of both names. A worker
that comes or goes moves only the sessions that are or were its own, and all routers agree without a word. The first
worker in that order takes the session unless its load is far above the mean (as in "Consistent Hashing with Bounded
Loads", Mirrokni et al., 2017): then the next one does, and always the same next one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import ClassVar

from router.policy.base import Candidate, Ranked, Ranking, RoutingRequest
from router.policy.least_load import LeastLoad, load_score

MAX_OVER_MEAN = 1.5
SLACK = 8  # load points above that: two requests that wait are no overload


class Session(Ranking):
    """Requests without a session go to the least loaded worker."""

    name: ClassVar[str] = "session"
    about: ClassVar[str] = "a session's own worker"

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self._least_load = LeastLoad()

    def rank(self, request: RoutingRequest, candidates: Sequence[Candidate]) -> Ranked:
        if not request.session or not candidates:
            by_load = self._least_load.rank(request, candidates)
            words = by_load.words
            return Ranked(by_load.candidates, lambda one: f"no session, {words(one)}")
        mean = sum(load_score(one.endpoint) for one in candidates) / len(candidates)
        most = MAX_OVER_MEAN * mean + SLACK
        ordered = sorted(candidates, key=lambda one: _weight(request.session, one.address), reverse=True)
        ordered.sort(key=lambda one: load_score(one.endpoint) > most)

        def why(one: Candidate) -> str:
            load = load_score(one.endpoint)
            return "the session's" if load <= most else f"overloaded, load {load} above {most:.0f}"

        return Ranked(ordered, why)


def _weight(session: str, address: str) -> bytes:
    return hashlib.blake2b(f"{session}\0{address}".encode(), digest_size=8).digest()
