"""The worker with the least load."""

from __future__ import annotations

from typing import ClassVar

from router.fleet.endpoint import Endpoint
from router.policy.base import NUM_RANKED, Candidate, Candidates, Ranked, Ranking, RoutingRequest

# Without a model of time.
WAITING_WEIGHT = 4  # a request that waits holds up the next one longer than one that shares the batch with it


def load_score(endpoint: Endpoint) -> int:
    """Least is best. Requests that the worker has not reported yet count as waiting, so that a burst spreads."""
    load = endpoint.load
    return WAITING_WEIGHT * (load.num_requests_waiting + endpoint.num_unreported) + load.num_requests_running


def kv_headroom(endpoint: Endpoint) -> float:
    """Share of KV blocks that a new request could take."""
    load = endpoint.load
    free, num_blocks = load.num_free_blocks + load.num_cached_blocks, load.num_blocks
    if free < num_blocks:
        return free / num_blocks
    return 1.0 if num_blocks else 0.0


def load_order(endpoint: Endpoint) -> tuple[int, int]:
    """Least is best; of equal loads, the worker with more KV headroom (in steps of a tenth)."""
    return load_score(endpoint), -round(10 * kv_headroom(endpoint))


def candidate_order(candidate: Candidate) -> tuple[int, int]:
    """Least is best. In milliseconds until a newcomer's turn, if the workers said how long their steps take; else
    `load_order`."""
    if candidate.in_seconds:
        return order_by_wait(candidate.endpoint, candidate.wait)
    return load_order(candidate.endpoint)


def order_by_wait(endpoint: Endpoint, wait_s: float) -> tuple[int, int]:
    return round(1000 * wait_s), -round(10 * kv_headroom(endpoint))


def load_in_words(candidate: Candidate) -> str:
    if candidate.in_seconds:
        return f"load {candidate.in_words(candidate.wait)}"
    return f"load {load_score(candidate.endpoint)}"


class LeastLoad(Ranking):
    """`4·waiting + running`; ties go to the worker with more KV headroom, then in rotation."""

    name: ClassVar[str] = "least_load"
    about: ClassVar[str] = "the least load"

    def rank(self, request: RoutingRequest, candidates: Candidates) -> Ranked:  # noqa: ARG002
        return Ranked(candidates.least_loaded(NUM_RANKED), load_in_words)
