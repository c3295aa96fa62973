"""Which worker computes an embedding: the one with the least to do. Prefill workers come first, as they have nothing
else to do. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from common.errors import UnavailableError
from common.types import WorkerRole
from router.fleet.endpoint import Endpoint
from router.fleet.fleet import Entry, Fleet, Group
from router.policy.base import RoutingRequest
from router.policy.least_load import load_score
from router.policy.routing import fits, unusable


def least_loaded(request: RoutingRequest, workers: Fleet | Sequence[Endpoint]) -> Endpoint:
    """Raises `UnavailableError`, with each worker's reason, if none can take the request."""
    fleet = workers if isinstance(workers, Fleet) else Fleet(workers)
    tried = {one.position for one in fleet.incarnations(request.tried)}
    best: tuple[bool, bool, Entry] | None = None
    for group in fleet.groups:
        if unusable(group.example, request) or not fits(group.example, request.num_tokens):
            continue
        entry = next((one for one in group.order(_by_load).entries if one[3] not in tried), None)
        if entry is not None:
            found = *_preference(group), entry
            best = found if best is None else min(best, found)
    if best is None:
        reasons = [
            f"{one.address}: {unusable(one, request) or 'too short a context, or failed already'}"
            for one in fleet.endpoints()
        ]
        raise UnavailableError(f"no worker can take the request ({'; '.join(reasons) or 'none is configured'})")
    return fleet.at(best[2][3]).endpoint


def _preference(group: Group) -> tuple[bool, bool]:
    """Least first. A worker that is left alone because it failed is taken if there is no other."""
    return bool(group.example.suspended), group.example.role is not WorkerRole.PREFILL


def _by_load(endpoint: Endpoint) -> tuple[float, float, float]:
    return load_score(endpoint), 0, 0
