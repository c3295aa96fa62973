"""One routing decision: filter, rank the decode workers, decide where the prompt is computed, rank the prefill workers.

Costs are counted in seconds if all workers said how long their steps take, and else in tokens (`router.policy.costs`).
Counted in tokens, a worker of a faster kind has a shorter queue sooner, and so gets more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from common.errors import UnavailableError
from common.types import WorkerRole, WorkerState
from router.fleet.endpoint import Endpoint
from router.policy.base import Candidate, Ranked, Ranking, Reasons, RoutingDecision, RoutingRequest
from router.policy.costs import HEDGE_QUEUE, MOVE_COST, TOKENS, Costs, SecondCosts, all_know_their_times, step_s
from router.policy.placement import Placement, placement_of

MAX_PREFILL_WORKERS = 3  # named to the decode worker, the first to be tried first
MAX_NAMED = 4  # workers in the line that explains a choice


class RoutingPolicy:
    """`Policy`, with a ranking for each role."""

    def __init__(self, prefill: Ranking, decode: Ranking, *, min_remote_tokens: int = 0, hedges: bool = False) -> None:
        """`min_remote_tokens`: see `common.prefill_place`. `hedges`: a second prefill worker may be asked."""
        self._prefill = prefill
        self._decode = decode
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
            placement = placement_of(request.num_prompt_tokens, decode, first, self._min_remote_tokens, costs)
        self._rotation += 1
        choices = [_choice("decode", ranked), _choice_of_placement(placement)]
        if asked and not placement.in_place:
            choices.append(_choice("prefill", ranked_prefill))
        computing = decode if placement.in_place or not asked else asked[0]
        return RoutingDecision(
            decode=decode.endpoint,
            prefill=() if placement.is_final else tuple([one.endpoint for one in asked[:MAX_PREFILL_WORKERS]]),
            reasons=Reasons(passed_over, choices),
            in_place=placement.in_place,
            min_remote_tokens=placement.min_remote_tokens,
            num_cached_tokens=decode.num_cached_tokens,
            num_missing_tokens=computing.num_missing_tokens,
            prefill_cost=_tokens_before_first(asked[0]) if asked else 0.0,
            prefill_s=asked[0].wait + asked[0].work if asked and costs.in_seconds else None,
            step_s=step_s(decode.endpoint, num_more=1) if costs.in_seconds else None,
            may_hedge=self._hedges and not placement.in_place and _may_hedge(asked, costs),
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
