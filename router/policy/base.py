"""Picks the workers of one request: filter, score, pick. Pure; the registry supplies what is known.

    endpoints ── filter ──> candidates ── rank ──> ranked ── pick ──> decode worker, prefill workers in order
                 ready, compatible,      the policy's
                 not tried before        own

A policy is a file of this package and a name in `registry`. It replaces `rank` or the whole of `pick`, and keeps what
state it needs to itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from common.errors import UnavailableError
from common.prefill_place import is_computed_in_place
from common.types import WorkerRole, WorkerState
from router.fleet.endpoint import Endpoint

MAX_PREFILL_WORKERS = 3  # named to the decode worker, the first to be tried first


@dataclass(slots=True, frozen=True, kw_only=True)
class RoutingRequest:
    """What a policy may know about a request."""

    num_prompt_tokens: int
    num_tokens: int = 0  # of prompt and answer together, at most
    fingerprint: str  # of the model and KV layout that the request was tokenized for
    tried: frozenset[tuple[str, str]] = frozenset()  # decode workers given up on: `Endpoint.incarnation`


@dataclass(slots=True, frozen=True, kw_only=True)
class RoutingDecision:
    decode: Endpoint
    prefill: tuple[Endpoint, ...]  # in order of preference; empty: the decode worker prefills in place
    reasons: tuple[str, ...]  # one line for each worker passed over, and for the choice
    min_remote_tokens: int = 0  # the decode worker asks for no fewer missing tokens, see `common.prefill_place`


class Policy(Protocol):
    def pick(self, request: RoutingRequest, endpoints: Sequence[Endpoint]) -> RoutingDecision:
        """Raises `UnavailableError`, with each worker's reason, if no decode worker can take the request."""
        ...


def unusable(endpoint: Endpoint, request: RoutingRequest) -> str:
    """Why `endpoint` cannot serve `request` in any role; empty if it can."""
    if endpoint.state is not WorkerState.READY:
        return endpoint.state.value
    if endpoint.excluded:
        return endpoint.excluded
    if endpoint.fingerprint != request.fingerprint:
        return f"holds KV of another kind ({endpoint.fingerprint or 'unknown'})"
    return ""


class RankingPolicy(ABC):
    """Filters, and leaves to `rank` who comes first. A policy that needs more is a `Policy` of its own."""

    def __init__(self, *, min_remote_tokens: int = 0) -> None:
        """`min_remote_tokens`: see `common.prefill_place`."""
        self._min_remote_tokens = min_remote_tokens
        self._rotation = 0

    @abstractmethod
    def rank(self, endpoints: Sequence[Endpoint]) -> list[Endpoint]:
        """The best first. `endpoints` start with another one at each request, so a stable sort spreads equal ones."""

    @abstractmethod
    def reason(self, endpoint: Endpoint) -> str:
        """Why `endpoint` came first, in a few words."""

    def pick(self, request: RoutingRequest, endpoints: Sequence[Endpoint]) -> RoutingDecision:
        reasons: list[str] = []
        usable: list[Endpoint] = []
        for endpoint in endpoints:
            if reason := unusable(endpoint, request):
                reasons.append(f"{endpoint.address}: {reason}")
            else:
                usable.append(endpoint)

        decode_candidates = []
        for endpoint in usable:
            if endpoint.can_decode and endpoint.incarnation in request.tried:
                reasons.append(f"{endpoint.address}: already failed this request")
            elif endpoint.can_decode and not _fits(endpoint, request.num_tokens):
                reasons.append(f"{endpoint.address}: its context has {endpoint.max_model_len} tokens, too few")
            elif endpoint.can_decode:
                decode_candidates.append(endpoint)
        if not decode_candidates:
            raise UnavailableError("no decode worker can take the request" + _listed(reasons))

        decode = self.rank(self._rotated(decode_candidates))[0]
        if is_computed_in_place(request.num_prompt_tokens, self._min_remote_tokens, decode.block_size):
            reasons.append(f"a prompt of {request.num_prompt_tokens} tokens is too short for a prefill worker")
            prefill = []
        else:
            fitting = [e for e in usable if _fits(e, request.num_prompt_tokens + 1)]
            prefill = self.rank(self._rotated(_prefill_candidates(decode, fitting)))[:MAX_PREFILL_WORKERS]
        self._rotation += 1
        where = "prefill by " + ", ".join(e.address for e in prefill) if prefill else "prefill in place"
        reasons.append(f"{decode.address}: {self.reason(decode)}, {where}")
        return RoutingDecision(
            decode=decode, prefill=tuple(prefill), reasons=tuple(reasons), min_remote_tokens=self._min_remote_tokens
        )

    def _rotated(self, endpoints: Sequence[Endpoint]) -> list[Endpoint]:
        start = self._rotation % len(endpoints) if endpoints else 0
        return [*endpoints[start:], *endpoints[:start]]


def _fits(endpoint: Endpoint, num_tokens: int) -> bool:
    return endpoint.max_model_len is None or num_tokens <= endpoint.max_model_len


def _prefill_candidates(decode: Endpoint, usable: Sequence[Endpoint]) -> list[Endpoint]:
    """Workers of both roles help each other only if the decode worker itself cannot prefill."""
    candidates = [e for e in usable if e.can_prefill and e.address != decode.address]
    if decode.role is WorkerRole.BOTH:
        return [e for e in candidates if e.role is WorkerRole.PREFILL]
    return candidates


def _listed(reasons: Sequence[str]) -> str:
    return f" ({'; '.join(reasons)})" if reasons else " (none is configured)"
