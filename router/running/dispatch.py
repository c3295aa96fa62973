"""Runs one request on the fleet to its end, even if workers fail or drain.

    pick ──> Decode ──tokens──> caller
      ^         │
      │         ├─ lost before the first token: the same request to another decode worker (a retry)
      ├─────────┼─ lost after it: prompt and tokens so far to another one (a migration); the caller notices nothing
      └─────────┴─ drains, or takes prompts alone from now on, and offers the request: the same, planned, and only if
                   there is another one (a handover)

Every token that the caller has received is in `output_token_ids` of the next attempt, and a worker only sends tokens
after those: none comes twice, none is missing. Seed and position decide each draw, so the text is the same too.
Cancelling the task that iterates cancels the call to the worker, and its deadline is what is left of the request's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial
from operator import attrgetter

from common import metrics
from common.errors import UnavailableError
from common.types import FinishReason
from router.fleet.registry import Registry
from router.policy.base import RoutingDecision
from router.running.attempts import Attempts, HandoverError
from router.running.request import GenerationRequest, NewTokens, Progress
from router.running.retries import Retries, WorkerLostError
from router.running.routes import Route, Routes, routing_request

log = logging.getLogger(__name__)

_TOKEN_ID = attrgetter("token_id")


class Dispatcher:
    """Shared by all requests of a router."""

    def __init__(
        self,
        registry: Registry,
        routes: Routes,
        retries: Retries | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._routes = routes
        self._retries = retries or Retries(registry, clock=clock)
        self._attempts = Attempts(registry, self._retries.budget, clock, routes.first_tokens)
        self._clock = clock

    async def run(
        self, request: GenerationRequest, progress: Progress, sent: list[int] | None = None
    ) -> AsyncGenerator[NewTokens, None]:
        """Yields tokens until one batch has a `finish_reason`; fills `progress` as it goes. `sent`: tokens that the
        caller has from a run that was left before its end; this run adds its own.

        Raises `UnavailableError` if no decode worker is left, `OverloadedError` if all refuse or its first token
        cannot come in time,
        `DeadlineError`, `SlowReaderError`, `InvalidArgumentError` if a worker refuses the request itself.
        """
        self._retries.budget.request()
        sent = [] if sent is None else sent  # tokens that the caller has
        if ended := _ended_by(request, sent):
            yield ended
            return
        route = await self._routes.route(request)
        decision = await self._pick(request, route, progress, None)
        while True:
            progress.report.decode_worker = decision.decode.address
            elsewhere = partial(self._routes.elsewhere, request, route, decision.decode)
            try:
                async with aclosing(self._attempts.run(request, decision, sent, progress, elsewhere)) as attempt:
                    async for new in attempt:
                        sent.extend(map(_TOKEN_ID, new.tokens))
                        yield new
                        if new.finish_reason is not None:
                            return
            except HandoverError as handover:
                is_shift = self._routes.takes_prompts_alone(decision.decode)
                why = "the worker takes prompts alone" if is_shift else "the worker drains"
                progress.lost(why, self._clock())
                decision = handover.decision
                self._count_handover(request, route, progress, decision, "role" if is_shift else "drain")
            except WorkerLostError as error:
                self._retries.lost(route, decision.decode, error)
                if ended := _ended_by(request, sent):
                    yield ended
                    return
                progress.lost(str(error), self._clock())
                self._allow_another(request, progress, error, has_tokens=bool(sent))
                decision = await self._pick(request, route, progress, error)

    async def choose(self, request: GenerationRequest) -> tuple[Route, RoutingDecision]:
        """Where `run` would send the request first, which may come to another router. Raises what `run` raises before
        it asks a worker."""
        route = await self._routes.route(request)

        def pick() -> RoutingDecision:
            return self._routes.pick(routing_request(request, route, self._routes.first_token(request)))

        decision = await self._retries.pick(pick, request.deadline, None)
        self._routes.admit(request, decision)
        return route, decision

    async def _pick(
        self, request: GenerationRequest, route: Route, progress: Progress, lost: WorkerLostError | None
    ) -> RoutingDecision:
        """A request that lost its worker prefers another worker, then the same one if it came back."""

        def pick() -> RoutingDecision:
            first_token = self._routes.first_token(request) if progress.first_token_at is None else None
            return self._routes.pick(routing_request(request, route, first_token))

        is_new = lost is None and not progress.num_pauses
        decision = self._routes.picked(request, route) if is_new else None
        if decision is None:
            decision = await self._retries.pick(pick, request.deadline, lost)
            if is_new:
                self._routes.admit(request, decision)
        cause = (
            "new" if is_new else "resumed" if lost is None else "migration" if progress.num_output_tokens else "retry"
        )
        self._routes.note(request, route, progress, decision, cause)
        return decision

    def _allow_another(
        self, request: GenerationRequest, progress: Progress, lost: WorkerLostError, *, has_tokens: bool
    ) -> None:
        """Counts the next attempt, or raises if there must be none."""
        report = progress.report
        extra = {"request_id": request.request_id, "decode_worker": report.decode_worker, "reason": str(lost)}
        if has_tokens:
            # A stream that a client already reads is not given up for the budget's sake.
            self._retries.budget.spend(self._clock())
            if report.num_migrations - report.num_handovers >= self._retries.limits.num_migrations:
                raise UnavailableError(f"gave up after {report.num_migrations} migrations; last: {lost}") from lost
            report.num_migrations += 1
            metrics.router_migrations.labels(lost.code).inc()
            log.warning("decode worker lost, migrating", extra={**extra, "num_tokens": progress.num_output_tokens})
            return
        self._retries.allow(progress.num_retries, lost)
        progress.num_retries += 1
        report.num_retries += 1
        log.warning("decode worker lost, retrying", extra=extra)

    def _count_handover(
        self, request: GenerationRequest, route: Route, progress: Progress, decision: RoutingDecision, why: str
    ) -> None:
        """Counts a handover, which does not use the retry budget: a drain or a shift of roles is no fault, and a worker
        does either rarely."""
        report = progress.report
        report.num_migrations += 1
        report.num_handovers += 1
        metrics.router_migrations.labels(why).inc()
        self._routes.note(request, route, progress, decision, "handover")
        log.info(
            "decode worker drains, handing over" if why == "drain" else "decode worker changes its role, handing over",
            extra={
                "request_id": request.request_id,
                "decode_worker": report.decode_worker,
                "to": decision.decode.address,
                "num_tokens": progress.num_output_tokens,
            },
        )


def _ended_by(request: GenerationRequest, sent: list[int]) -> NewTokens | None:
    """The finish reason if a lost worker had generated the whole answer but did not get to say so."""
    if not sent:
        return None
    params = request.sampling_params
    last = sent[-1]
    is_eos = not params.ignore_eos and last in request.model.eos_token_ids
    if len(sent) > params.min_tokens and (is_eos or last in params.stop_token_ids):
        return NewTokens([], FinishReason.STOP, last)
    if len(sent) >= params.max_tokens:
        return NewTokens([], FinishReason.LENGTH)
    return None
