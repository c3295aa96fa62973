"""Which worker computes an embedding: the one with the least to do. Prefill workers come first, as they have nothing
else to do. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from common.errors import UnavailableError
from common.types import WorkerRole
from router.fleet.endpoint import Endpoint
from router.policy.base import RoutingRequest
from router.policy.least_load import load_score
from router.policy.routing import fits, unusable


def least_loaded(request: RoutingRequest, endpoints: Sequence[Endpoint]) -> Endpoint:
    """Raises `UnavailableError`, with each worker's reason, if none can take the request."""
    usable = [
        one
        for one in endpoints
        if not unusable(one, request) and fits(one, request.num_tokens) and one.incarnation not in request.tried
    ]
    if not usable:
        reasons = [
            f"{one.address}: {unusable(one, request) or 'too short a context, or failed already'}" for one in endpoints
        ]
        raise UnavailableError(f"no worker can take the request ({'; '.join(reasons) or 'none is configured'})")
    return min(usable, key=_load)


def _load(endpoint: Endpoint) -> tuple[bool, bool, float]:
    """The worker's load, least first. A worker that is left alone because it failed is taken if there is no other."""
    return bool(endpoint.suspended), endpoint.role is not WorkerRole.PREFILL, load_score(endpoint)
