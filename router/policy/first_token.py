"""Which workers give a request's first token in time. Pure, in seconds.

    chosen by the policy ── in time, nine times in ten ──> stays
            │
            └── else: the prefill workers and the decode workers that would have computed the prompt first
                    ├── some in time: of them the pair that costs least, what it takes from other requests included
                    ├── none for sure: the policy's choice stays, or requests in a hurry would get in each other's way
                    └── none, even if all goes well: likewise, and the request is late

A prefill worker's first token comes after the prompts queued there and the request's own. A decode worker computes both
beside its decodes. What the decode worker of a pair has to do beforehand adds nothing: the first token passes through
it, and the KV follows. So a pair's time is that of the worker which computes the prompt, and only the workers that
have least queued are looked at, one by one, until no other can be sooner.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from router.policy.base import Candidate, Candidates, FirstTokenTarget, Late, cost_in_words
from router.policy.costs import CHUNK, SECONDS, first_token_s, in_place_s

NUM_LOOKED_AT = 8  # workers of one role, at most


@dataclass(slots=True, frozen=True)
class Way:
    """One pair of workers, or a decode worker alone."""

    decode: Candidate
    prefill: Candidate | None  # None: `decode` computes the prompt
    first_token_s: float  # predicted, from now

    @property
    def computing(self) -> Candidate:
        return self.prefill or self.decode

    def words(self) -> str:
        place = "in place" if self.prefill is None else f"after {self.prefill.address}"
        return f"{self.decode.address} {place} in {cost_in_words(self.first_token_s, in_seconds=True)}"


@dataclass(slots=True, frozen=True)
class Forecast:
    way: Way  # where the request goes
    late: Late | None
    reason: Callable[[], str]


def way_of(decode: Candidate, prefill: Candidate | None, target: FirstTokenTarget) -> Way:
    return Way(decode, prefill, _first_token_s(prefill or decode, target))


def in_time(
    target: FirstTokenTarget,
    chosen: Way,
    prefill: Candidates | None,
    in_place: Callable[[], Candidates],
    handoff_token_s: float | None,
) -> Forecast:
    """`chosen`: what the policy wants. `prefill`: workers that may compute the prompt for its decode worker, None if it
    is too short for that. `in_place`: decode workers that may compute it; asked for only if `chosen` may be late."""
    left_s = target.left_s
    if chosen.first_token_s * target.high <= left_s:
        return Forecast(chosen, None, lambda: f"first token: due in {_ms(left_s)}, {chosen.words()}")
    helped, unseen_helped_s = _soonest(prefill, lambda one: way_of(chosen.decode, one, target))
    decode = in_place()
    alone, unseen_s = _soonest(decode, lambda one: way_of(one, None, target))
    ways = [chosen, *helped, *alone]
    sure = [
        one for one in ways if one.first_token_s * target.high <= left_s and _leaves_time(one.computing, target.token_s)
    ]
    soonest = min(ways, key=lambda one: one.first_token_s)
    if sure:
        best = min(sure, key=lambda one: _cost(one, handoff_token_s))
        return Forecast(best, None, lambda: _instead(left_s, chosen, best))
    soonest_s = min(soonest.first_token_s, unseen_helped_s, unseen_s)
    if soonest_s * target.low <= left_s:
        return Forecast(chosen, None, lambda: _instead(left_s, chosen, chosen))
    num_workers = len(decode) + (0 if prefill is None else len(prefill))
    alone_s = min(_alone_s(one.computing) for one in ways)
    late = Late(soonest_s, alone_s, num_workers)
    return Forecast(
        chosen, late, lambda: f"first token: {_due(left_s)}, too soon for all; the soonest is {soonest.words()}"
    )


def _soonest(candidates: Candidates | None, way: Callable[[Candidate], Way]) -> tuple[Sequence[Way], float]:
    """The ways that may be the soonest, and about the least seconds that one which was not looked at may take."""
    found: list[Way] = []
    best_s = least_s = inf
    for one, least_s in () if candidates is None else candidates.soonest_computed(NUM_LOOKED_AT):
        if best_s <= least_s:
            return found, inf
        found.append(way(one))
        best_s = min(best_s, found[-1].first_token_s)
    is_whole = candidates is None or len(candidates) <= len(found)
    return found, inf if is_whole else least_s


def _first_token_s(one: Candidate, target: FirstTokenTarget) -> float:
    return first_token_s(one.endpoint, one.num_missing_tokens, one.num_cached_tokens, target.left_s)


def _alone_s(one: Candidate) -> float:
    return SECONDS.prompt(one.endpoint, one.num_missing_tokens, one.num_cached_tokens)


def _leaves_time(one: Candidate, token_s: float | None) -> bool:
    """Whether steps with a chunk of the prompt are short enough for the decodes beside it, whose targets are thought to
    be the request's own."""
    time = one.endpoint.batch_time
    if token_s is None or time is None or not one.endpoint.can_decode:
        return True
    decodes = SECONDS.decodes(one.endpoint)
    num_new = min(one.num_missing_tokens, CHUNK)
    return not decodes.num_decodes or time.chunk_seconds(num_new, one.num_cached_tokens, decodes) <= token_s


def _cost(way: Way, handoff_token_s: float | None) -> float:
    """Seconds until the request's second token can follow, and those that decodes lose beside its prompt."""
    one = way.computing
    cost = way.first_token_s
    if one.endpoint.can_decode:
        cost += in_place_s(one.endpoint, one.num_missing_tokens, one.num_cached_tokens)[1]
    if way.prefill is not None:
        missing, cached = way.decode.num_missing_tokens, way.decode.num_cached_tokens
        cost += SECONDS.handoff(one.endpoint, missing, cached, handoff_token_s)
    return cost


def _instead(left_s: float, chosen: Way, best: Way) -> str:
    if best is chosen:
        return f"first token: {_due(left_s)}, {chosen.words()}, and no other is in time for sure"
    return f"first token: {_due(left_s)}, {best.words()} instead of {chosen.words()}"


def _due(left_s: float) -> str:
    return f"due in {_ms(left_s)}" if left_s > 0 else f"was due {_ms(-left_s)} ago"


def _ms(seconds: float) -> str:
    return cost_in_words(seconds, in_seconds=True)
