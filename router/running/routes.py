"""Decides by the policy where a request goes next, and notes each decision."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from msgspec.structs import replace
from prometheus_client import Counter

from common import metrics
from common.errors import OverloadedError, UnavailableError
from common.sampling import SamplingParams, parameters
from common.types import WorkerRole, WorkerState
from protos.convert import LATER_PARAMETERS
from router.fleet.endpoint import Endpoint
from router.fleet.fleet import Fleet
from router.fleet.registry import Registry
from router.policy.base import FirstTokenTarget, Policy, RoutingDecision, RoutingRequest
from router.policy.embedding import least_loaded
from router.policy.routing import fits, unusable
from router.running.decisions import Decisions, bounded_lines
from router.running.first_token_times import FirstTokenTimes
from router.running.late import LateRequests
from router.running.picks import Incarnation, Pick, Picks, UnusablePickError
from router.running.request import Attempt, GenerationRequest, Progress

log = logging.getLogger(__name__)

MAX_TOKENS_HERE = 2**13  # of a prompt whose blocks are named at once, in less than a millisecond; others by a thread

PickT = TypeVar("PickT")

_LATER = [(name, parameters()[name].default) for name in LATER_PARAMETERS]


@dataclass(slots=True)
class Route:
    """What decides where a request goes next: its blocks, and the workers it was on (`Endpoint.incarnation`)."""

    block_names: Sequence[bytes] = ()
    tried: set[tuple[str, str]] = field(default_factory=set)
    refused: set[tuple[str, str]] = field(default_factory=set)  # of `tried`, those that are there and said no

    def refuse(self, endpoint: Endpoint) -> None:
        self.tried.add(endpoint.incarnation)
        self.refused.add(endpoint.incarnation)


class Routes:
    """The routes of all requests of a router."""

    def __init__(
        self,
        registry: Registry,
        policy: Policy,
        decisions: Decisions | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        refuses_late: bool = False,
        picks: Picks | None = None,
    ) -> None:
        """`refuses_late`: requests whose first token no workers can give in time; else they are served all the
        same. `picks`: checks what endpoint pickers chose; None: nobody asks one."""
        self.picks = picks
        self.policy = policy  # another one may take its place at any time
        self.late = LateRequests(refuses=refuses_late, clock=clock)
        self.first_tokens = FirstTokenTimes()
        self._registry = registry
        self._decisions = decisions or Decisions()
        self._clock = clock

    async def route(self, request: GenerationRequest) -> Route:
        """Chooses the route of a request that was nowhere yet. The blocks that it looks for leave out the prompt's last
        token, which is always computed."""
        token_ids = request.prompt_token_ids
        name = partial(request.model.block_names, token_ids[: len(token_ids) - 1], request.cache_salt)
        return Route(name() if len(token_ids) <= MAX_TOKENS_HERE else await asyncio.to_thread(name))

    def pick(self, wanted: RoutingRequest) -> RoutingDecision:
        """Raises `UnavailableError` if no decode worker can take the request now. Workers that were lost, and did not
        say no, are asked again if there is no other: each may be back."""
        if wanted.block_names:
            now, index, names = self._clock(), self._registry.blocks.index, wanted.block_names
            wanted = replace(
                wanted,
                cached_blocks=index.match(names, now),
                num_told_blocks=lambda address: index.num_told(address, names),
                handoff_token_s=self.first_tokens.handoff_token_s(now),
            )
        return self._pick(self.policy.pick, wanted)

    def pick_for_embedding(self, wanted: RoutingRequest) -> Endpoint:
        """`pick`, of a worker of any role that only computes the prompt."""
        return self._pick(least_loaded, wanted)

    def _pick(self, pick: Callable[[RoutingRequest, Fleet], PickT], wanted: RoutingRequest) -> PickT:
        fleet = self._registry.fleet()
        try:
            return pick(wanted, fleet)
        except UnavailableError:
            if wanted.tried == wanted.refused:
                raise
            return pick(replace(wanted, tried=wanted.refused), fleet)

    def elsewhere(self, request: GenerationRequest, route: Route, offering: Endpoint) -> RoutingDecision | None:
        """The worker that could go on instead of one that offers to hand the request over; None if none can now. The
        worker asks again. It drains, or takes prompts alone from now on: then the request goes to one that does not,
        and has room, and may come back if all others are lost."""
        is_shift = self.takes_prompts_alone(offering)
        if not is_shift:
            route.refuse(offering)
        try:
            decision = self.pick(routing_request(request, route))
        except UnavailableError:
            return None
        if is_shift and (self.takes_prompts_alone(decision.decode) or decision.decode.load.room_after):
            return None
        return decision

    def takes_prompts_alone(self, endpoint: Endpoint) -> bool:
        """Whether this process of a worker is there, and takes no requests."""
        member = self._registry.fleet().member(endpoint.address)
        if member is None or member.endpoint.incarnation != endpoint.incarnation:
            return False
        taken = member.endpoint.taken
        return member.endpoint.state is WorkerState.READY and taken is not None and taken.role is WorkerRole.PREFILL

    def first_token(self, request: GenerationRequest) -> FirstTokenTarget | None:
        """How soon the request wants its first token, if it does."""
        targets = request.slo.targets
        if targets is None or targets.ttft_ms is None:
            return None
        left_s = request.arrived_at + targets.ttft_ms / 1000 - self._clock()
        return self.first_tokens.target(left_s, None if targets.tpot_ms is None else targets.tpot_ms / 1000)

    def admit(self, request: GenerationRequest, decision: RoutingDecision) -> None:
        """The first decision about a request. Raises `OverloadedError` if its first token cannot come in time, and such
        requests are refused. Further answers to a prompt, and steps of a search, go on as the first one does."""
        targets = request.slo.targets
        if decision.late is None or targets is None or request.is_follow_up or request.siblings.decode is not None:
            return
        try:
            self.late.take(request.request_id, targets, self._clock() - request.arrived_at, decision.late)
        except OverloadedError:
            self._decisions.add(request, decision, "refused")
            raise

    def picked(self, request: GenerationRequest, route: Route) -> RoutingDecision | None:
        """The decision of an endpoint picker that comes with the request; None if there is none, or none that can be
        followed now."""
        picks = self.picks
        if picks is None or not request.picked or request.is_follow_up:
            return None
        try:
            pick = picks.read(request.picked)
            if (pick.request_id, pick.num_prompt_tokens) != (request.request_id, request.num_prompt_tokens):
                raise UnusablePickError("other", "it is for another request")
            picks.let_go(pick.number)
            decision = self._as_picked(pick, routing_request(request, route))
        except UnusablePickError as error:
            picks.not_followed(request.request_id, error)
            return None
        picks.count("followed")
        return decision

    def _as_picked(self, pick: Pick, wanted: RoutingRequest) -> RoutingDecision:
        """Raises `UnusablePickError`. Of several prefill workers the first has to be there."""
        decode = self._still_there(pick.decode, wanted, decodes=True)
        prefill = []
        for number, incarnation in enumerate(pick.prefill):
            try:
                prefill.append(self._still_there(incarnation, wanted, decodes=False))
            except UnusablePickError:
                if number == 0:
                    raise
        return pick.decision(decode, prefill)

    def _still_there(self, incarnation: Incarnation, wanted: RoutingRequest, *, decodes: bool) -> Endpoint:
        """Raises `UnusablePickError`."""
        found = self._registry.fleet().incarnations((incarnation,))
        if not found:
            raise UnusablePickError("gone", f"{incarnation[0]} is not there any more")
        endpoint = found[0].endpoint
        why = unusable(endpoint, wanted) or endpoint.suspended
        if not (endpoint.can_decode or endpoint.may_go_on_decoding if decodes else endpoint.can_prefill):
            why = why or "takes other work by now"
        if not fits(endpoint, wanted.num_tokens if decodes else wanted.num_prompt_tokens + 1):
            why = why or f"its context has {endpoint.max_model_len} tokens, too few"
        if why:
            raise UnusablePickError("gone", f"{endpoint.address}: {why}")
        return endpoint

    def ahead(self, route: Route, decision: RoutingDecision, num_prompt_tokens: int) -> AbstractContextManager[None]:
        """Counts a request that was decided about and has not come yet as load of its workers."""
        now, index = self._clock(), self._registry.blocks.index
        for address in load_of(decision):
            index.expect(address, route.block_names, now)
        return self._registry.sending(load_of(decision), slack_s=decision.slack_s, num_context=num_prompt_tokens)

    def note(
        self, request: GenerationRequest, route: Route, progress: Progress, decision: RoutingDecision, cause: str
    ) -> None:
        """The request goes where `decision` says: its blocks will be there, and people may ask why."""
        _decided("split" if decision.split_at else "in_place" if decision.in_place else "remote").inc()
        metrics.router_expected_cached_tokens.inc(decision.num_cached_tokens)
        request.siblings.decode = request.siblings.decode or decision.decode.incarnation
        now, index = self._clock(), self._registry.blocks.index
        helper = "" if decision.in_place or not decision.prefill else decision.prefill[0].address
        context = None if request.traced is None else request.traced.own.child()
        progress.attempts.append(Attempt(cause, decision.decode.address, now, prefill_worker=helper, context=context))
        for address in load_of(decision):
            index.expect(address, route.block_names, now)
        if log.isEnabledFor(logging.DEBUG):
            log.debug("routed", extra={"request_id": request.request_id, "reasons": decision.reasons.lines()})
        if request.is_follow_up:
            return
        self._decisions.add(request, decision, cause)
        if request.explain:
            progress.report.routing.extend(f"{cause}: {reason}" for reason in bounded_lines(decision.reasons))


def routing_request(
    request: GenerationRequest, route: Route, first_token: FirstTokenTarget | None = None
) -> RoutingRequest:
    """What a policy may know about `request`, which was on workers by `route`."""
    return RoutingRequest(
        num_prompt_tokens=len(request.prompt_token_ids),
        num_tokens=len(request.prompt_token_ids) + request.sampling_params.max_tokens,
        fingerprint=request.model.fingerprint,
        tried=frozenset(route.tried),
        refused=frozenset(route.refused),
        block_names=route.block_names,
        session=request.session,
        beside=request.siblings.decode,
        parameters=_later_parameters(request.sampling_params),
        in_place=request.wants_prompt_logprobs,
        first_token=first_token,
    )


@functools.cache
def _decided(place: str) -> Counter:
    return metrics.router_decisions.labels(place)


def load_of(decision: RoutingDecision) -> dict[str, int]:
    """The load that this decision adds to each worker, in prompt tokens to compute. The router counts it until the
    worker's own report includes it."""
    missing = decision.num_missing_tokens
    if decision.in_place or not decision.prefill:
        return {decision.decode.address: missing}
    return {decision.decode.address: decision.num_tail_tokens, decision.prefill[0].address: missing}


def _later_parameters(params: SamplingParams) -> frozenset[str]:
    """Sampling parameters that `params` uses and that an older worker would ignore."""
    return frozenset([name for name, default in _LATER if getattr(params, name) != default])
