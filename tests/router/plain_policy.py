"""Routing decisions made the plain way, to compare with: every worker is looked at, and all of them are sorted."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import overload

from common.errors import UnavailableError
from common.types import WorkerRole
from router.fleet.endpoint import Endpoint
from router.policy.base import Candidate, Candidates, Reasons, RoutingDecision, RoutingRequest
from router.policy.costs import (
    HEDGE_QUEUE,
    MOVE_COST,
    TOKENS,
    Costs,
    SecondCosts,
    all_know_their_times,
    first_token_s,
    step_s,
)
from router.policy.first_token import better_split, in_time, way_of
from router.policy.least_load import candidate_order, load_in_words, load_order, load_score
from router.policy.placement import Placement, placement_of
from router.policy.routing import _by_way, fits, unusable
from router.policy.session import MAX_OVER_MEAN, SLACK

MAX_PREFILL_WORKERS = 3
MAX_NAMED = 4


@dataclass(slots=True, frozen=True)
class Ranked:
    candidates: Sequence[Candidate]
    words: Callable[[Candidate], str]


class PlainRanking:
    """Each policy's order of candidates, a list that is rotated by one at each request."""

    def __init__(self, name: str, seed: int) -> None:
        self._rank = getattr(self, name)
        self._seed = seed
        self._num_drawn = 0

    def rank(self, request: RoutingRequest, candidates: Sequence[Candidate]) -> Ranked:
        ranked: Ranked = self._rank(request, candidates)
        return ranked

    def least_load(self, _request: RoutingRequest, candidates: Sequence[Candidate]) -> Ranked:
        return Ranked(sorted(candidates, key=candidate_order), load_in_words)

    def round_robin(self, _request: RoutingRequest, candidates: Sequence[Candidate]) -> Ranked:
        return Ranked(candidates, lambda _: "in turn")

    def prefix_aware(self, _request: RoutingRequest, candidates: Sequence[Candidate]) -> Ranked:
        return Ranked(
            sorted(candidates, key=lambda one: (one.wait + one.work, candidate_order(one))),
            lambda one: (
                f"{one.num_cached_tokens} tokens cached, work {one.in_words(one.work)} + wait {one.in_words(one.wait)}"
            ),
        )

    def power_of_two(self, _request: RoutingRequest, candidates: Sequence[Candidate]) -> Ranked:
        rest = list(candidates)
        drawn = [rest.pop(self._draw(len(rest))) for _ in range(min(2, len(rest)))]
        drawn.sort(key=candidate_order)
        rest.sort(key=candidate_order)
        return Ranked(drawn + rest, lambda one: f"drawn, {load_in_words(one)}" if one in drawn else load_in_words(one))

    def _draw(self, num: int) -> int:
        self._num_drawn += 1
        digest = hashlib.blake2b(f"{self._seed}/{self._num_drawn}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") % num

    def session(self, request: RoutingRequest, candidates: Sequence[Candidate]) -> Ranked:
        if not request.session or not candidates:
            by_load = self.least_load(request, candidates)
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


class PlainCandidates(Candidates):
    """Of a list, in its order. Only what a request with a target asks for."""

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        self._candidates = candidates

    def __len__(self) -> int:
        return len(self._candidates)

    @overload
    def __getitem__(self, index: int) -> Candidate: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Candidate]: ...
    def __getitem__(self, index: int | slice) -> Candidate | Sequence[Candidate]:
        return self._candidates[index]

    def soonest_computed(self, num: int) -> Iterator[tuple[float, Callable[[], Candidate]]]:
        timed = [(first_token_s(one.endpoint, 1, 0, inf) + one.work, one) for one in self._candidates]
        timed.sort(key=lambda one: (one[0], *load_order(one[1].endpoint)))
        return ((seconds, lambda one=one: one) for seconds, one in timed[:num])  # type: ignore[misc]

    def soonest(self, num: int) -> Sequence[Candidate]:
        raise NotImplementedError

    least_loaded = soonest

    def of(self, address: str) -> Candidate | None:
        raise NotImplementedError

    @property
    def mean_load(self) -> float:
        raise NotImplementedError

    @property
    def addresses(self) -> Sequence[str]:
        raise NotImplementedError


class PlainPolicy:
    def __init__(
        self, prefill: str, decode: str, *, min_remote_tokens: int = 0, hedges: bool = False, seed: int = 0
    ) -> None:
        self._prefill = PlainRanking(prefill, seed)
        self._decode = PlainRanking(decode, seed)
        self._min_remote_tokens = min_remote_tokens
        self._hedges = hedges
        self._seconds = SecondCosts()
        self._rotation = 0

    def pick(self, request: RoutingRequest, endpoints: Sequence[Endpoint]) -> RoutingDecision:
        passed_over: list[tuple[str, str]] = []
        usable = _usable(request, endpoints, passed_over)
        decode_workers = []
        for endpoint in usable:
            if endpoint.can_decode and endpoint.incarnation in request.tried:
                passed_over.append((endpoint.address, "already failed this request"))
            elif endpoint.can_decode and not fits(endpoint, request.num_tokens):
                passed_over.append((endpoint.address, f"its context has {endpoint.max_model_len} tokens, too few"))
            elif endpoint.can_decode:
                decode_workers.append(endpoint)
        if not decode_workers:
            raise UnavailableError("no decode worker can take the request" + _listed(Reasons(passed_over).lines()))
        if beside := [endpoint for endpoint in decode_workers if endpoint.incarnation == request.beside]:
            decode_workers = beside
            passed_over.append((beside[0].address, "other answers to this prompt are there"))

        costs: Costs = self._seconds if all_know_their_times(usable) else TOKENS
        helpers = [endpoint.role for endpoint in usable if endpoint.can_prefill and not request.in_place]
        ranked = self._decode.rank(
            request, [_decode_candidate(request, e, helpers, costs) for e in self._rotated(decode_workers)]
        )
        decode = ranked.candidates[0]

        helping = [e for e in _prefill_workers(decode.endpoint, usable) if fits(e, request.num_prompt_tokens + 1)]
        prefill_workers = [] if request.in_place else self._rotated(helping)
        ranked_prefill = self._prefill.rank(request, [_prefill_candidate(request, e, costs) for e in prefill_workers])
        asked = ranked_prefill.candidates
        if request.in_place:
            placement = Placement(True, _all_in_place, 0, is_final=True)
        else:
            first = asked[0] if asked else None
            least, handoff_s = self._min_remote_tokens, request.handoff_token_s
            placement = placement_of(request.num_prompt_tokens, decode, first, least, costs, handoff_s)
        choices = [_choice("decode", ranked), _choice_of_placement(placement)]
        if asked and not placement.in_place:
            choices.append(_choice("prefill", ranked_prefill))
        forecast = None
        way = None
        if asked and costs.in_seconds and not placement.is_final:
            way = better_split(decode, asked[:MAX_PREFILL_WORKERS], request)
            if way is not None:
                choices.append(way.why_split)
                decode, asked, placement = _by_way(way, decode, asked, placement)
        if request.first_token is not None and costs.in_seconds:
            whole = way_of(decode, None if placement.in_place or not asked else asked[0], request.first_token)
            chosen = way or whole
            is_long = decode.num_missing_tokens >= max(self._min_remote_tokens, decode.endpoint.block_size)
            helping_now = PlainCandidates([_prefill_candidate(request, e, costs) for e in prefill_workers])
            alone = PlainCandidates([_prefill_candidate(request, e, costs) for e in self._rotated(decode_workers)])
            may_help = helping_now if is_long and asked else None
            forecast = in_time(request, request.first_token, chosen, may_help, lambda: alone)
            choices.append(forecast.reason)
            if forecast.way is not chosen:
                way = forecast.way
                decode, asked, placement = _by_way(way, decode, asked, placement)
        self._rotation += 1
        computing = decode if placement.in_place or not asked else asked[0]
        split_at = 0 if way is None or way.split is None else way.split.at
        slack_s = None
        if request.first_token is not None and costs.in_seconds:
            missing, cached = computing.num_missing_tokens, computing.num_cached_tokens
            slack_s = request.first_token.left_s - costs.prompt(computing.endpoint, missing, cached)
        return RoutingDecision(
            decode=decode.endpoint,
            prefill=() if placement.is_final else tuple([one.endpoint for one in asked[:MAX_PREFILL_WORKERS]]),
            reasons=Reasons(passed_over, choices),
            in_place=placement.in_place,
            min_remote_tokens=placement.min_remote_tokens,
            num_cached_tokens=decode.num_cached_tokens,
            num_missing_tokens=computing.num_missing_tokens,
            split_at=split_at,
            num_tail_tokens=request.num_prompt_tokens - split_at if split_at else 0,
            prefill_cost=_tokens_before_first(asked[0]) if asked else 0.0,
            prefill_s=asked[0].wait + asked[0].work if asked and costs.in_seconds else None,
            step_s=step_s(decode.endpoint, num_more=1) if costs.in_seconds else None,
            may_hedge=self._hedges and not placement.in_place and _may_hedge(asked, costs),
            first_token_s=None if forecast is None else forecast.way.first_token_s,
            slack_s=slack_s,
            late=None if forecast is None else forecast.late,
        )

    def _rotated(self, endpoints: Sequence[Endpoint]) -> list[Endpoint]:
        start = self._rotation % len(endpoints) if endpoints else 0
        return [*endpoints[start:], *endpoints[:start]]


def _usable(
    request: RoutingRequest, endpoints: Sequence[Endpoint], passed_over: list[tuple[str, str]]
) -> list[Endpoint]:
    """Workers that can serve `request` in some role, suspended ones only if no other decode worker is left."""
    usable, suspended = [], []
    for endpoint in endpoints:
        if reason := unusable(endpoint, request):
            passed_over.append((endpoint.address, reason))
        elif endpoint.suspended:
            suspended.append(endpoint)
        else:
            usable.append(endpoint)
    if not any(e.can_decode and e.incarnation not in request.tried and fits(e, request.num_tokens) for e in usable):
        return usable + suspended
    passed_over += [(endpoint.address, endpoint.suspended) for endpoint in suspended]
    return usable


def _cached_tokens(request: RoutingRequest, endpoint: Endpoint) -> int:
    return 0 if request.in_place else request.cached_blocks.get(endpoint.address, 0) * endpoint.block_size


def _decode_candidate(
    request: RoutingRequest, endpoint: Endpoint, helpers: Sequence[WorkerRole], costs: Costs
) -> Candidate:
    """`helpers`: roles of all workers that can prefill."""
    cached = _cached_tokens(request, endpoint)
    missing = max(request.num_prompt_tokens - cached, 1)
    wait = costs.queue(endpoint) + costs.load(endpoint)
    is_helped = WorkerRole.PREFILL in helpers if endpoint.role is WorkerRole.BOTH else bool(helpers)
    work = costs.prompt(endpoint, missing, cached)
    return Candidate(endpoint, cached, missing, wait, MOVE_COST * work if is_helped else work, costs.in_seconds)


def _prefill_candidate(request: RoutingRequest, endpoint: Endpoint, costs: Costs) -> Candidate:
    cached = _cached_tokens(request, endpoint)
    missing = max(request.num_prompt_tokens - cached, 1)
    wait = costs.queue(endpoint) + (costs.load(endpoint) if endpoint.can_decode else 0)
    return Candidate(endpoint, cached, missing, wait, costs.prompt(endpoint, missing, cached), costs.in_seconds)


def _tokens_before_first(candidate: Candidate) -> float:
    """Tokens that a prefill worker computes until it is done with the prompt."""
    endpoint = candidate.endpoint
    return TOKENS.queue(endpoint) + (TOKENS.load(endpoint) if endpoint.can_decode else 0) + candidate.num_missing_tokens


def _prefill_workers(decode: Endpoint, usable: Sequence[Endpoint]) -> list[Endpoint]:
    return [endpoint for endpoint in usable if _helps(endpoint, decode)]


def _helps(endpoint: Endpoint, decode: Endpoint) -> bool:
    """Workers of both roles help each other only if the decode worker itself cannot prefill."""
    if not endpoint.can_prefill or endpoint.address == decode.address:
        return False
    return decode.role is not WorkerRole.BOTH or endpoint.role is WorkerRole.PREFILL


def _may_hedge(asked: Sequence[Candidate], costs: Costs) -> bool:
    """A second worker is only asked if it has little to do: if all are behind, computing prompts twice would put them
    further behind."""
    return len(asked) > 1 and asked[1].wait <= asked[1].work + costs.prompt(asked[1].endpoint, HEDGE_QUEUE, 0)


def _choice(role: str, ranked: Ranked) -> Callable[[], str]:
    """The line that explains it. Keeps few of the candidates: there may be a thousand, and many decisions are kept."""
    best, num_more, words = ranked.candidates[:MAX_NAMED], len(ranked.candidates) - MAX_NAMED, ranked.words

    def line() -> str:
        named = [f"{one.address} ({words(one)})" for one in best]
        more = f" and {num_more} more" if num_more > 0 else ""
        others = f", before {', '.join(named[1:])}{more}" if named[1:] else ""
        return f"{role} by {named[0]}{others}"

    return line


def _choice_of_placement(placement: Placement) -> Callable[[], str]:
    return lambda: f"prefill {'in place' if placement.in_place else 'remote'}: {placement.reason()}"


def _all_in_place() -> str:
    return "the request asks for what only computing its prompt gives"


def _listed(reasons: Sequence[str]) -> str:
    return f" ({'; '.join(reasons)})" if reasons else " (none is configured)"


def plain_least_loaded(request: RoutingRequest, endpoints: Sequence[Endpoint]) -> Endpoint:
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
