"""One routing decision: filter, rank the decode workers, decide where the prompt is computed, rank the prefill workers.

Costs are counted in seconds if all workers said how long their steps take, and else in tokens (`router.policy.costs`).
Counted in tokens, a worker of a faster kind has a shorter queue sooner, and so gets more.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf

from msgspec import structs

from common.errors import UnavailableError
from common.types import WorkerRole, WorkerState
from router.fleet.endpoint import Endpoint
from router.fleet.fleet import LAST, Fleet, Group, Member
from router.policy.base import (
    NUM_RANKED,
    Candidate,
    Candidates,
    Ranked,
    Ranking,
    Reasons,
    RoutingDecision,
    RoutingRequest,
)
from router.policy.candidates import FleetCandidates, PromptLevels
from router.policy.costs import (
    ANSWER_TOKENS,
    HEDGE_QUEUE,
    MOVE_COST,
    SECONDS,
    TOKENS,
    Costs,
    all_know_their_times,
    step_s,
)
from router.policy.first_token import Forecast, Way, better_split, in_time, way_of
from router.policy.placement import Placement, placement_of

MAX_PREFILL_WORKERS = 3  # named to the decode worker, the first to be tried first
DECODES = frozenset({WorkerRole.DECODE, WorkerRole.BOTH})
PREFILLS = frozenset({WorkerRole.PREFILL, WorkerRole.BOTH})

PassedOver = tuple[tuple[str, str], ...]
"""Addresses of workers, and why not them."""


class RoutingPolicy:
    """`Policy`, with a ranking for each role."""

    def __init__(self, prefill: Ranking, decode: Ranking, *, min_remote_tokens: int = 0, hedges: bool = False) -> None:
        """`min_remote_tokens`: see `common.prefill_place`. `hedges`: a second prefill worker may be asked."""
        self._prefill = prefill
        self._decode = decode
        self._min_remote_tokens = min_remote_tokens
        self._hedges = hedges
        self._turn = 0  # decisions so far

    def pick(self, request: RoutingRequest, workers: Fleet | Sequence[Endpoint]) -> RoutingDecision:
        fleet = workers if isinstance(workers, Fleet) else Fleet(workers)
        usable = _usable(request, fleet)
        passed_over, decode_groups, without, only = usable.passed_over, usable.decode, usable.tried, None
        if request.beside and (beside := _beside(request.beside, fleet, usable)):
            only, without = beside.position, ()
            passed_over = (*passed_over, (beside.endpoint.address, "other answers to this prompt are there"))

        costs: Costs = SECONDS if usable.know_times else TOKENS
        helpers = () if request.in_place else usable.helpers
        levels = PromptLevels(request, fleet)
        candidates = partial(FleetCandidates, request, fleet, costs=costs, turn=self._turn, levels=levels)
        decode_candidates = candidates(
            decode_groups, roles=DECODES, work=partial(_decode_work, costs, helpers), without=without, only=only
        )
        ranked = self._decode.rank(request, decode_candidates)
        decode = ranked.candidates[0]

        helping = [] if request.in_place else _helping(decode.endpoint, usable.groups, request.num_prompt_tokens + 1)
        prefill_candidates = candidates(helping, roles=PREFILLS, work=costs.prompt)
        ranked_prefill = self._prefill.rank(request, prefill_candidates)
        asked = ranked_prefill.candidates
        if request.in_place:
            placement = Placement(True, _all_in_place, 0, is_final=True)
        else:
            first = asked[0] if asked else None
            placement = placement_of(
                request.num_prompt_tokens, decode, first, self._min_remote_tokens, costs, request.handoff_token_s
            )
        choices = [_choice("decode", ranked, len(decode_candidates)), _choice_of_placement(placement)]
        if asked and not placement.in_place:
            choices.append(_choice("prefill", ranked_prefill, len(prefill_candidates)))
        forecast: Forecast | None = None
        way: Way | None = None  # in place of what the policy chose
        if asked and costs.in_seconds and not placement.is_final:
            way = better_split(decode, asked[:MAX_PREFILL_WORKERS], request)
            if way is not None:
                choices.append(way.why_split)
                decode, asked, placement = _by_way(way, decode, asked, placement)
        if request.first_token is not None and costs.in_seconds:
            helper = None if placement.in_place or not asked else asked[0]
            chosen = way or way_of(decode, helper, request.first_token)
            is_long = decode.num_missing_tokens >= max(self._min_remote_tokens, decode.endpoint.block_size)
            in_place = partial(decode_candidates.with_work, costs.prompt)
            may_help = prefill_candidates if is_long and asked else None
            going_on = partial(_going_on, request, fleet, usable, candidates) if only is None else _nobody
            forecast = in_time(request, request.first_token, chosen, may_help, in_place, going_on)
            choices.append(forecast.reason)
            if forecast.way is not chosen:
                way = forecast.way
                decode, asked, placement = _by_way(way, decode, asked, placement)
        self._turn += 1
        computing = decode if placement.in_place or not asked else asked[0]
        split_at = 0 if way is None or way.split is None else way.split.at
        slack_s: float | None = None
        if forecast is not None and request.first_token is not None:
            alone_s = costs.prompt(computing.endpoint, computing.num_missing_tokens, computing.num_cached_tokens)
            slack_s = request.first_token.left_s - alone_s
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
            step_s=_token_s(decode.endpoint, costs) if costs.in_seconds else None,
            may_hedge=self._hedges and not placement.in_place and _may_hedge(asked, costs),
            first_token_s=None if forecast is None else forecast.way.first_token_s,
            slack_s=slack_s,
            late=None if forecast is None else forecast.late,
        )


@dataclass(slots=True, frozen=True)
class _Sorted:
    """The groups of a fleet, for one kind of request."""

    usable: tuple[Group, ...]  # that can serve it in some role
    suspended: tuple[Group, ...]  # likewise, and left alone
    passed_over: PassedOver  # the workers of all others
    usual: _Usable | None  # of a request that nobody has tried; None if that depends on more
    shortest: float  # tokens: `usual` is that of requests which are no longer


class _Usable:
    """Where a request can go."""

    __slots__ = ("decode", "groups", "helpers", "know_times", "passed_over", "tried")

    def __init__(
        self, groups: Sequence[Group], decode: Sequence[Group], tried: Collection[int], passed_over: PassedOver
    ) -> None:
        self.groups = groups  # in some role
        self.decode = decode  # of these, decode workers that have room for it
        self.tried = tried  # positions of workers of `decode` that failed it
        self.passed_over = passed_over
        self.helpers = tuple([group.example.role for group in groups if group.example.can_prefill])
        self.know_times = all_know_their_times([group.example for group in groups])


def _usable(request: RoutingRequest, fleet: Fleet) -> _Usable:
    """Suspended workers only if no other decode worker is left. Raises `UnavailableError` if none is left at all."""
    kind = "usable", request.fingerprint, request.parameters
    known = fleet.remembered(kind, partial(_sorted_by_use, request, fleet))
    if known.usual is not None and not request.tried and request.num_tokens <= known.shortest:
        return known.usual
    tried = [one for one in fleet.incarnations(request.tried) if one.endpoint.can_decode]
    decode = _decode_groups(request, known.usable)
    groups, passed_over = known.usable, known.passed_over
    if sum(map(len, decode)) > sum(one.group in decode for one in tried):
        if known.suspended:
            passed_over += _lines(
                (at, one.address, one.suspended) for group in known.suspended for at, one in group.endpoints.items()
            )
    elif known.suspended:
        groups += known.suspended
        decode = _decode_groups(request, groups)
    failed = {one.position for one in tried if one.group in groups}
    too_short = tuple([group for group in groups if group.example.can_decode and group not in decode])
    if failed:
        passed_over += _failed_or_too_short(fleet, failed, too_short)
    elif too_short:
        name = "too short", *map(id, too_short)
        passed_over += fleet.remembered(name, lambda: _failed_or_too_short(fleet, failed, too_short))
    without = {one.position for one in tried if one.group in decode} if failed else ()
    if sum(map(len, decode)) == len(without):
        listed = Reasons(passed_over).lines()
        raise UnavailableError("no decode worker can take the request" + _listed(listed))
    return _Usable(groups, decode, without, passed_over)


def _sorted_by_use(request: RoutingRequest, fleet: Fleet) -> _Sorted:
    reasons = {group: unusable(group.example, request) for group in fleet.groups}
    usable = [group for group, reason in reasons.items() if not reason]
    not_suspended = tuple([group for group in usable if not group.example.suspended])
    suspended = tuple([group for group in usable if group.example.suspended])
    passed_over = _lines(
        (at % LAST, one.address, reason)
        for group, reason in reasons.items()
        if reason
        for at, one in group.endpoints.items()
    )
    decode = tuple([group for group in not_suspended if group.example.can_decode])
    contexts = [group.example.max_model_len for group in decode]
    usual = _Usable(not_suspended, decode, (), passed_over) if decode and not suspended else None
    return _Sorted(
        not_suspended, suspended, passed_over, usual, min([one for one in contexts if one is not None], default=inf)
    )


def _decode_groups(request: RoutingRequest, groups: Sequence[Group]) -> tuple[Group, ...]:
    return tuple([one for one in groups if one.example.can_decode and fits(one.example, request.num_tokens)])


def _failed_or_too_short(fleet: Fleet, failed: Collection[int], too_short: Iterable[Group]) -> PassedOver:
    lines = [(one, fleet.at(one).endpoint.address, "already failed this request") for one in failed]
    for group in too_short:
        why = f"its context has {group.example.max_model_len} tokens, too few"
        lines += [(at, one.address, why) for at, one in group.endpoints.items() if at not in failed]
    return _lines(lines)


def _lines(workers: Iterable[tuple[int, str, str]]) -> PassedOver:
    """In the order of positions."""
    return tuple([(address, why) for _, address, why in sorted(workers)])


def _beside(incarnation: tuple[str, str], fleet: Fleet, usable: _Usable) -> Member | None:
    """The worker of this incarnation, if the request can go there."""
    for one in fleet.incarnations((incarnation,)):
        if one.group in usable.decode and one.position not in usable.tried:
            return one
    return None


def unusable(endpoint: Endpoint, request: RoutingRequest) -> str:
    """Why `endpoint` cannot serve `request` in any role; empty if it can."""
    if endpoint.state is not WorkerState.READY:
        return endpoint.state.value
    if endpoint.excluded:
        return endpoint.excluded
    if unknown := request.parameters - endpoint.parameters:
        return f"is of a version that does not know {', '.join(sorted(unknown))}"
    if endpoint.fingerprint != request.fingerprint:
        return f"holds KV of another kind ({endpoint.fingerprint or 'unknown'})"
    return ""


def fits(endpoint: Endpoint, num_tokens: int) -> bool:
    """Whether the worker's context has room for so many tokens; True if it has not said how long that is."""
    return endpoint.max_model_len is None or num_tokens <= endpoint.max_model_len


def _decode_work(
    costs: Costs, helpers: Sequence[WorkerRole], endpoint: Endpoint, num_missing: int, num_cached: int
) -> float:
    """`helpers`: roles of all workers that can prefill."""
    is_helped = WorkerRole.PREFILL in helpers if endpoint.role is WorkerRole.BOTH else bool(helpers)
    work = costs.prompt(endpoint, num_missing, num_cached)
    return MOVE_COST * work if is_helped else work


def _by_way(
    way: Way, decode: Candidate, asked: Sequence[Candidate], placement: Placement
) -> tuple[Candidate, Sequence[Candidate], Placement]:
    """Where the request goes for the sake of its first token, in place of where the policy wanted it. Of a split prompt
    the first of the prefill workers has its part."""
    missing, prefill = way.decode.num_missing_tokens, way.prefill
    if prefill is not None:
        others = [one for one in asked if one.address != prefill.address]
        if (split := way.split) is not None:
            missing = split.at - way.decode.num_cached_tokens
            others = [one for one in others if one.endpoint.splits]
            prefill = structs.replace(prefill, num_missing_tokens=0, work=0.0)
        least = min(placement.min_remote_tokens, missing)
        remote = replace(placement, in_place=False, min_remote_tokens=least, is_final=False)
        return decode, [prefill, *others], remote
    most_here = max(placement.min_remote_tokens, missing + way.decode.endpoint.block_size)
    in_place = replace(placement, in_place=True, min_remote_tokens=most_here)
    if way.decode.address == decode.address:
        return way.decode, asked, in_place
    return way.decode, (), in_place  # `asked` were to help another worker


def _going_on(
    request: RoutingRequest, fleet: Fleet, usable: _Usable, candidates: Callable[..., FleetCandidates]
) -> Candidates | None:
    """Prefill workers that may have the whole answer."""
    groups = [one for one in usable.groups if one.example.may_go_on_decoding and fits(one.example, request.num_tokens)]
    if not groups:
        return None
    tried = {one.position for one in fleet.incarnations(request.tried) if one.group in groups}
    return candidates(groups, roles=PREFILLS, work=SECONDS.prompt, without=tried)


def _nobody() -> None:
    return None


def _token_s(endpoint: Endpoint, costs: Costs) -> float:
    """Seconds between two tokens of an answer there."""
    return costs.load(endpoint) / ANSWER_TOKENS if endpoint.can_decode else step_s(endpoint, num_more=1)


def _tokens_before_first(candidate: Candidate) -> float:
    """Tokens that a prefill worker computes until it is done with the prompt."""
    return TOKENS.wait(candidate.endpoint) + candidate.num_missing_tokens


def _helping(decode: Endpoint, groups: Sequence[Group], num_tokens: int) -> list[Group]:
    """Workers of both roles help each other only if the decode worker itself cannot prefill."""
    roles = {WorkerRole.PREFILL} if decode.role is WorkerRole.BOTH else PREFILLS
    return [one for one in groups if one.example.role in roles and fits(one.example, num_tokens)]


def _may_hedge(asked: Sequence[Candidate], costs: Costs) -> bool:
    """A second worker is only asked if it has little to do: if all are behind, computing prompts twice would put them
    further behind."""
    return len(asked) > 1 and asked[1].wait <= asked[1].work + costs.prompt(asked[1].endpoint, HEDGE_QUEUE, 0)


def _choice(role: str, ranked: Ranked, num_candidates: int) -> Callable[[], str]:
    """The line that explains it. Keeps few of the candidates: many decisions are kept."""
    best, num_more, words = ranked.candidates[:NUM_RANKED], num_candidates - NUM_RANKED, ranked.words

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
