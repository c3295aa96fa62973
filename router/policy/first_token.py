"""Which workers give a request's first token in time. Pure, in seconds.

    chosen by the policy ── in time, nine times in ten ──> stays
            │
            └── else: the prefill workers and the decode workers that would have computed the prompt first
                    ├── some in time: of them the pair that costs least, what it takes from other requests included
                    ├── none, but a prefill worker that may go on decoding: the soonest of those
                    ├── none for sure: the policy's choice stays, or requests in a hurry would get in each other's way
                    └── none, even if all goes well: likewise, and the request is late

A prefill worker's first token comes after the prompts queued there and the request's own. A decode worker computes both
beside its decodes. What the decode worker of a pair has to do beforehand adds nothing, unless it has no room: the first
token passes through it, and the KV follows. So a pair's time is that of the worker which computes the prompt, and only
the workers that have least queued are looked at, one by one, until no other can be sooner.

A prompt may be split: the prefill worker hands its beginning over, and the decode worker computes the rest. Each token
more in the first part costs one worker about what it saves the other, so all of it on one of them is best, but for one
point: what the prefill worker has is handed over before all that waits there, as nothing is computed for it. So a
prompt is split behind that, or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf

from router.policy.base import Candidate, Candidates, FirstTokenTarget, Late, RoutingRequest, cost_in_words
from router.policy.costs import CHUNK, SECONDS, first_token_s, in_place_s, room_s

NUM_LOOKED_AT = 8  # workers of one role, at most
SPLIT_GAIN = 0.5  # of the seconds of a whole prompt, to be saved: queues are often done sooner than predicted
LEAST_CHUNK = 16  # tokens: a chunk of fewer is mostly the step's own time
LEAST_PART = 64  # tokens: fewer are worth no part of their own


@dataclass(slots=True)
class Split:
    """A prompt in two parts. Seconds."""

    at: int  # tokens before this one are the prefill worker's, in whole blocks
    handoff_s: float  # of their KV
    tail_s: float  # to compute the rest beside the decode worker's decodes
    lost_s: float  # by these decodes together
    first_token_s: float

    @property
    def cost_s(self) -> float:
        return self.first_token_s + self.lost_s


@dataclass(slots=True)
class Way:
    """One pair of workers, or a decode worker alone."""

    decode: Candidate
    prefill: Candidate | None  # None: `decode` computes the prompt
    first_token_s: float  # predicted, from now
    split: Split | None = None
    instead_s: float | None = None  # what the best way costs that does not split the prompt, if this one does for that

    @property
    def computing(self) -> Candidate:
        return self.prefill or self.decode

    def why_split(self) -> str:
        split, prefill = self.split, self.prefill
        if split is None or prefill is None:
            return ""
        cost = _ms(split.cost_s)
        instead = "" if self.instead_s is None else f" instead of {_ms(self.instead_s)}"
        return (
            f"prefill split: costs {cost}{instead}: {split.at} tokens that {prefill.address} has (handoff "
            f"{_ms(split.handoff_s)}), the rest by {self.decode.address} (computing {_ms(split.tail_s)}, lost by its "
            f"decodes {_ms(split.lost_s)})"
        )

    def words(self) -> str:
        place = "in place" if self.prefill is None else f"after {self.prefill.address}"
        place += "" if self.split is None else f" (to token {self.split.at})"
        return f"{self.decode.address} {place} in {cost_in_words(self.first_token_s, in_seconds=True)}"


@dataclass(slots=True)
class Forecast:
    way: Way  # where the request goes
    late: Late | None
    reason: Callable[[], str]


def way_of(decode: Candidate, prefill: Candidate | None, target: FirstTokenTarget | None) -> Way:
    """Where nothing is split."""
    return Way(decode, prefill, _pair_s(decode, prefill, None if target is None else target.left_s))


def better_split(decode: Candidate, helpers: Sequence[Candidate], request: RoutingRequest) -> Way | None:
    """The way that splits the prompt, if all of it on either worker costs clearly more: seconds until the first token,
    and those that decodes lose. `helpers`: prefill workers, the best first. Only in seconds."""
    most_cached = max(helpers, key=_num_cached)
    if most_cached.num_cached_tokens < decode.num_cached_tokens + LEAST_PART:  # `_split` finds nothing for anybody
        return None
    found: list[tuple[Candidate, Split]] = []
    for prefill in (helpers[0],) if most_cached is helpers[0] else (helpers[0], most_cached):
        if _may_pay(decode, prefill) and (split := _split(decode, prefill, request)) is not None:
            found.append((prefill, split))
    if not found:
        return None
    prefill, split = min(found, key=lambda one: one[1].cost_s)
    target = request.first_token
    whole_s = min(
        one.first_token_s + _lost_s(one) for one in (way_of(decode, None, target), way_of(decode, helpers[0], target))
    )
    if split.cost_s > (1 - SPLIT_GAIN) * whole_s:
        return None
    return Way(decode, prefill, split.first_token_s, split, whole_s)


def _num_cached(one: Candidate) -> int:
    return one.num_cached_tokens


def _may_pay(decode: Candidate, prefill: Candidate) -> bool:
    """Whether a closer look may find that a split costs less than half of the whole: the rest of the prompt, and the
    decodes that wait for it, beside all that is queued and the rest. In tokens, which is quick, if both workers take
    equally long."""
    one, helper = decode.endpoint, prefill.endpoint
    if one.batch_time is not helper.batch_time:
        return True
    num_queued = helper.load.num_queued_prompt_tokens + helper.num_unreported_tokens
    num_rest = prefill.num_missing_tokens  # at least: it may have less than is thought
    num_delayed = max(one.load.num_requests_running, 1)
    return (1 + num_delayed) * num_rest <= (1 - SPLIT_GAIN) * (num_queued + num_rest)


def _sooner_way(chosen: Way, prefill: Candidate, request: RoutingRequest) -> Way:
    """The soonest way of the chosen decode worker and `prefill`, split or not."""
    decode, first = chosen.decode, chosen.prefill
    is_chosen = first is not None and chosen.split is None and first.endpoint is prefill.endpoint
    whole = chosen if is_chosen else way_of(decode, prefill, request.first_token)
    split = _split(decode, prefill, request)
    if split is None or split.first_token_s >= whole.first_token_s:
        return whole
    return Way(decode, prefill, split.first_token_s, split)


def _split(decode: Candidate, prefill: Candidate, request: RoutingRequest) -> Split | None:
    """Behind what the prefill worker has. None if it would go on with the rest at once, or the decode worker has about
    as much, or one of them knows no split prompts."""
    helper, missing = prefill.endpoint, decode.num_missing_tokens
    if not (helper.splits and decode.endpoint.splits) or missing < 2 * LEAST_PART:
        return None
    if not (helper.load.num_queued_prompt_tokens or helper.num_unreported_tokens):
        return None
    size, told = max(decode.endpoint.block_size, 1), request.num_told_blocks
    first, stop = decode.num_cached_tokens, decode.num_cached_tokens + missing
    if prefill.num_cached_tokens < first + LEAST_PART:
        return None
    at = prefill.num_cached_tokens if told is None else min(told(prefill.address) * size, prefill.num_cached_tokens)
    at = min(at, stop - 1) // size * size
    if at < first + LEAST_PART:
        return None
    left_s = None if request.first_token is None else request.first_token.left_s
    if request.handoff_token_s is None:
        handoff_s = SECONDS.handoff(helper, at - first, first, None)
    else:
        handoff_s = request.handoff_token_s * (at - first)  # all of it, not the last chunk alone
    tail_s, lost_s = in_place_s(decode.endpoint, stop - at, at)
    # The decode worker asks once it has room, and comes to the rest after what is queued there.
    comes_s = max(room_s(decode.endpoint, left_s) + handoff_s, first_token_s(decode.endpoint, 1, stop - 1, left_s))
    return Split(at, handoff_s, tail_s, lost_s, comes_s + tail_s)


def in_time(
    request: RoutingRequest,
    target: FirstTokenTarget,
    chosen: Way,
    prefill: Candidates | None,
    in_place: Callable[[], Candidates],
    going_on: Callable[[], Candidates | None] = lambda: None,
) -> Forecast:
    """`chosen`: what the policy wants. `prefill`: workers that may compute the prompt for its decode worker, None if it
    is too short for that. `in_place`: decode workers that may compute it; asked for only if `chosen` may be late.
    `going_on`: prefill workers that may have the whole answer, too, if decode workers are all worse off."""
    left_s = target.left_s
    if chosen.first_token_s * target.high <= left_s:
        return Forecast(chosen, None, lambda: f"first token: due in {_ms(left_s)}, {chosen.words()}")
    helped, unseen_helped_s = _soonest(prefill, lambda one: _sooner_way(chosen, one, request))
    decode = in_place()
    alone, unseen_s = _soonest(decode, lambda one: way_of(one, None, target))
    ways = [chosen, *[one for one in helped if one is not chosen], *alone]
    sure = [paced for one in ways if (paced := _paced_in_time(one, target)) is not None]
    soonest = min(ways, key=lambda one: one.first_token_s)
    if sure:
        best = min(sure, key=lambda one: _cost(one, request.handoff_token_s))
        return Forecast(best, None, lambda: _instead(left_s, chosen, best))
    others = [] if (may_go_on := going_on()) is None else _soonest(may_go_on, lambda one: way_of(one, None, target))[0]
    if timely := [one for one in others if one.first_token_s * target.high <= left_s]:
        first = min(timely, key=lambda one: one.first_token_s)
        return Forecast(first, None, lambda: f"{_instead(left_s, chosen, first)}: all decode workers are worse off")
    soonest_s = min(soonest.first_token_s, unseen_helped_s, unseen_s)
    if soonest_s * target.low <= left_s:
        return Forecast(chosen, None, lambda: _instead(left_s, chosen, chosen))
    num_workers = len(decode) + (0 if prefill is None else len(prefill))
    alone_s = min([_alone_s(one.computing) for one in ways])
    late = Late(soonest_s, alone_s, num_workers)
    return Forecast(
        chosen, late, lambda: f"first token: {_due(left_s)}, too soon for all; the soonest is {soonest.words()}"
    )


def _soonest(candidates: Candidates | None, way: Callable[[Candidate], Way]) -> tuple[Sequence[Way], float]:
    """The ways that may be the soonest, and about the least seconds that one which was not looked at may take."""
    found: list[Way] = []
    best_s = least_s = inf
    for least_s, who in () if candidates is None else candidates.soonest_computed(NUM_LOOKED_AT):
        if best_s <= least_s:
            return found, inf
        found.append(way(who()))
        best_s = min(best_s, found[-1].first_token_s)
        if best_s <= least_s:  # what follows would not be sooner than that: do not even look for it
            return found, inf
    is_whole = candidates is None or len(candidates) <= len(found)
    return found, inf if is_whole else least_s


def _pair_s(decode: Candidate, prefill: Candidate | None, left_s: float | None) -> float:
    one = prefill or decode
    seconds = first_token_s(one.endpoint, one.num_missing_tokens, one.num_cached_tokens, left_s)
    if prefill is not None and decode.endpoint.load.room_after:  # it asks once it has room
        return max(seconds, room_s(decode.endpoint, left_s) + _alone_s(prefill))
    return seconds


def _alone_s(one: Candidate) -> float:
    return SECONDS.prompt(one.endpoint, one.num_missing_tokens, one.num_cached_tokens)


def _paced_in_time(way: Way, target: FirstTokenTarget) -> Way | None:
    """`way` if it is in time for sure, and the answers beside it keep their pace."""
    if way.first_token_s * target.high > target.left_s:
        return None
    if (paced_s := _paced_s(way, target.token_s)) == way.first_token_s:
        return way
    return replace(way, first_token_s=paced_s) if paced_s * target.high <= target.left_s else None


def _paced_s(way: Way, token_s: float | None) -> float:
    """Seconds until the first token if the decodes beside the prompt keep their pace, whose targets are thought to be
    the request's own: its chunks are cut to steps of `token_s`. `inf` if these have no time for a chunk."""
    one, num_new, num_cached = way.computing, way.computing.num_missing_tokens, way.computing.num_cached_tokens
    if way.split is not None:
        one, num_cached = way.decode, way.split.at
        num_new = one.num_cached_tokens + one.num_missing_tokens - num_cached
    if token_s is None or not one.endpoint.can_decode or num_new <= LEAST_CHUNK:
        return way.first_token_s
    chunks, most = SECONDS.beside(one.endpoint), min(num_new, CHUNK)
    if not one.endpoint.load.num_requests_running or (whole_s := chunks.seconds(most, num_cached)) <= token_s:
        return way.first_token_s
    least_s = chunks.seconds(LEAST_CHUNK, num_cached)
    if least_s > token_s:
        return inf
    cut = LEAST_CHUNK + (most - LEAST_CHUNK) * (token_s - least_s) / (whole_s - least_s)
    uncut_s, _ = in_place_s(one.endpoint, num_new, num_cached)
    return way.first_token_s - uncut_s + ceil(num_new / cut) * token_s


def _cost(way: Way, handoff_token_s: float | None) -> float:
    """Seconds until the request's second token can follow, and those that decodes lose beside its prompt."""
    cost = way.first_token_s + _lost_s(way)
    if way.prefill is not None and way.split is None:
        one = way.prefill
        missing, cached = way.decode.num_missing_tokens, way.decode.num_cached_tokens
        cost += SECONDS.handoff(one.endpoint, missing, cached, handoff_token_s)
    return cost


def _lost_s(way: Way) -> float:
    """Seconds that decodes lose beside the prompt."""
    if way.split is not None:
        return way.split.lost_s
    one = way.computing
    if not one.endpoint.can_decode:
        return 0.0
    return in_place_s(one.endpoint, one.num_missing_tokens, one.num_cached_tokens)[1]


def _instead(left_s: float, chosen: Way, best: Way) -> str:
    if best is chosen:
        return f"first token: {_due(left_s)}, {chosen.words()}, and no other is in time for sure"
    return f"first token: {_due(left_s)}, {best.words()} instead of {chosen.words()}"


def _due(left_s: float) -> str:
    return f"due in {_ms(left_s)}" if left_s > 0 else f"was due {_ms(-left_s)} ago"


def _ms(seconds: float) -> str:
    return cost_in_words(seconds, in_seconds=True)
