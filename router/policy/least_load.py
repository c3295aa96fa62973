"""Picks the workers of one request: filter, score, pick. Pure; the registry supplies what is known.

    endpoints ── filter ──> candidates ── score ──> ranked ── pick ──> decode worker, prefill workers in order
                 ready, compatible,      load, KV headroom,
                 not tried before        rotation

A policy is an object with one method, so that later ones (round robin, power of two choices, matched prefix, predicted
latency) replace `score` or the whole of it, and keep what state they need to themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from common.errors import UnavailableError
from common.types import WorkerRole, WorkerState
from router.fleet.endpoint import Endpoint

WAITING_WEIGHT = 4  # a request that waits holds up the next one longer than one that shares the batch with it
MAX_PREFILL_WORKERS = 3  # named to the decode worker, the first to be tried first


@dataclass(slots=True, frozen=True, kw_only=True)
class RoutingRequest:
    """What a policy may know about a request."""

    num_prompt_tokens: int
    fingerprint: str  # of the model and KV layout that the request was tokenized for
    tried: frozenset[tuple[str, str]] = frozenset()  # decode workers given up on: `Endpoint.incarnation`


@dataclass(slots=True, frozen=True, kw_only=True)
class RoutingDecision:
    decode: Endpoint
    prefill: tuple[Endpoint, ...]  # in order of preference; empty: the decode worker prefills in place
    reasons: tuple[str, ...]  # one line for each worker passed over, and for the choice


class Policy(Protocol):
    def pick(self, request: RoutingRequest, endpoints: Sequence[Endpoint]) -> RoutingDecision:
        """Raises `UnavailableError`, with each worker's reason, where no decode worker can take the request."""
        ...


def unusable(endpoint: Endpoint, request: RoutingRequest) -> str:
    """Why `endpoint` cannot serve `request` in any role; empty where it can."""
    if endpoint.state is not WorkerState.READY:
        return endpoint.state.value
    if endpoint.excluded:
        return endpoint.excluded
    if endpoint.fingerprint != request.fingerprint:
        return f"holds KV of another kind ({endpoint.fingerprint or 'unknown'})"
    return ""


def load_score(endpoint: Endpoint) -> int:
    """Least is best. Requests that the worker has not reported yet count as waiting, so that a burst spreads."""
    load = endpoint.load
    return WAITING_WEIGHT * (load.num_requests_waiting + endpoint.num_unreported) + load.num_requests_running


def kv_headroom(endpoint: Endpoint) -> float:
    """Share of KV blocks that a new request could take."""
    load = endpoint.load
    return (load.num_free_blocks + load.num_cached_blocks) / load.num_blocks if load.num_blocks else 0.0


class LeastLoad:
    """`4·waiting + running`; ties go to the worker with more KV headroom (in steps of a tenth), then in rotation."""

    def __init__(self) -> None:
        self._rotation = 0

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
            elif endpoint.can_decode:
                decode_candidates.append(endpoint)
        if not decode_candidates:
            raise UnavailableError("no decode worker can take the request" + _listed(reasons))

        decode = self._ranked(decode_candidates)[0]
        prefill = self._ranked(_prefill_candidates(decode, usable))[:MAX_PREFILL_WORKERS]
        self._rotation += 1
        where = "prefill by " + ", ".join(e.address for e in prefill) if prefill else "prefill in place"
        reasons.append(f"{decode.address}: least load ({load_score(decode)}), {where}")
        return RoutingDecision(decode=decode, prefill=tuple(prefill), reasons=tuple(reasons))

    def _ranked(self, endpoints: Sequence[Endpoint]) -> list[Endpoint]:
        start = self._rotation % len(endpoints) if endpoints else 0
        rotated = [*endpoints[start:], *endpoints[:start]]  # the sort is stable
        return sorted(rotated, key=lambda e: (load_score(e), -round(10 * kv_headroom(e))))


def _prefill_candidates(decode: Endpoint, usable: Sequence[Endpoint]) -> list[Endpoint]:
    """Workers of both roles help each other only where the decode worker itself cannot prefill."""
    candidates = [e for e in usable if e.can_prefill and e.address != decode.address]
    if decode.role is WorkerRole.BOTH:
        return [e for e in candidates if e.role is WorkerRole.PREFILL]
    return candidates


def _listed(reasons: Sequence[str]) -> str:
    return f" ({'; '.join(reasons)})" if reasons else " (none is configured)"
