"""Requests of one session go to one worker, as long as it is not overloaded.

By rendezvous hashing (Thaler and Ravishankar, 1998): each session orders all workers by a hash of both names. A worker
that comes or goes moves only the sessions that are or were its own, and all routers agree without a word. The first
worker in that order takes the session unless its load is far above the mean (as in "Consistent Hashing with Bounded
Loads", Mirrokni et al., 2017): then the next one does, and always the same next one.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterator, Sequence
from functools import partial
from typing import ClassVar

from router.policy.base import NUM_RANKED, Candidate, Candidates, Ranked, Ranking, RoutingRequest
from router.policy.least_load import LeastLoad, load_score

MAX_OVER_MEAN = 1.5
SLACK = 8  # load points above that: two requests that wait are no overload
NUM_KEPT = 32  # first workers of a session, which is as many as most sessions ever ask for
MAX_SESSIONS = 4096  # whose first workers are kept: to find them takes a hash of each worker's name


class Session(Ranking):
    """Requests without a session go to the least loaded worker."""

    name: ClassVar[str] = "session"
    about: ClassVar[str] = "a session's own worker"

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self._least_load = LeastLoad()
        self._addresses: Sequence[str] = ()
        self._first: dict[str, list[str]] = {}  # by session: of `_addresses`, the first in the session's order

    def rank(self, request: RoutingRequest, candidates: Candidates) -> Ranked:
        if not request.session or not candidates:
            by_load = self._least_load.rank(request, candidates)
            words = by_load.words
            return Ranked(by_load.candidates, lambda one: f"no session, {words(one)}")
        most = MAX_OVER_MEAN * candidates.mean_load + SLACK
        ordered: list[Candidate] = []
        overloaded: list[Candidate] = []
        for one in self._in_order(request.session, candidates):
            (overloaded if load_score(one.endpoint) > most else ordered).append(one)
            if len(ordered) == NUM_RANKED:
                break
        ordered = [*ordered, *overloaded][:NUM_RANKED]

        def why(one: Candidate) -> str:
            load = load_score(one.endpoint)
            return "the session's" if load <= most else f"overloaded, load {load} above {most:.0f}"

        return Ranked(ordered, why)

    def _in_order(self, session: str, candidates: Candidates) -> Iterator[Candidate]:
        addresses = candidates.addresses
        if addresses is not self._addresses:
            self._addresses = addresses
            self._first.clear()
        weight = partial(_weight, session)
        if (first := self._first.pop(session, None)) is None:
            first = heapq.nlargest(NUM_KEPT, addresses, weight)
        self._first[session] = first  # behind those that were asked for before
        if len(self._first) > MAX_SESSIONS:
            del self._first[next(iter(self._first))]
        yield from filter(None, map(candidates.of, first))
        if len(first) < len(addresses):
            yield from filter(None, map(candidates.of, sorted(addresses, key=weight, reverse=True)[len(first) :]))


def _weight(session: str, address: str) -> bytes:
    return hashlib.blake2b(f"{session}\0{address}".encode(), digest_size=8).digest()
