"""Runs one request on the fleet, whatever happens to the workers.

    pick ──> Decode ──tokens──> caller
      ^         │
      │         ├─ lost before the first token: the same request to another decode worker (a retry)
      ├─────────┼─ lost after it: prompt and tokens so far to another one (a migration); the caller notices nothing
      └─────────┴─ drains and offers the request: the same, planned, and only if there is another one (a handover)

Every token that the caller has received is in `output_token_ids` of the next attempt, and a worker only sends tokens
after those: none comes twice, none is missing. Seed and position decide each draw, so the text is the same too.
Cancelling the task that iterates cancels the call to the worker, and its deadline is what is left of the request's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial

from common import metrics
from common.block_hash import block_hashes, extra_keys, root_hash
from common.errors import (
    BatonError,
    DeadlineError,
    InternalError,
    InvalidArgumentError,
    OverloadedError,
    SlowReaderError,
    UnavailableError,
)
from common.grpc_status import error_of_call
from common.peers import MAX_WORDS
from common.retry_budget import RetryBudget
from common.sampling import SamplingParams, parameters
from common.types import FinishReason, SampledToken
from protos.baton.v1 import decode_pb2, types_pb2
from protos.convert import LATER_PARAMETERS, finish_reason_of
from protos.messages import message_of
from router.fleet.decode_stream import CallFailedError, DecodeCall, DecodeStreams, SingleCall
from router.fleet.endpoint import Endpoint
from router.fleet.registry import Registry
from router.policy.base import Policy, RoutingDecision, RoutingRequest
from router.serving.decisions import Decisions, bounded_reasons
from router.serving.decode_events import DecodeEvents, FalseEventError
from router.serving.fair_queue import name_of
from router.serving.prefill_times import PrefillTimes
from router.serving.request import GenerationRequest

log = logging.getLogger(__name__)

FULL = "RESOURCE_EXHAUSTED"
NO_FAULTS = (FULL, "FAILED_PRECONDITION", "DEADLINE_EXCEEDED", "CANCELLED")  # of a worker that does not go on
MAX_TOKENS_HERE = 2**13  # of a prompt whose blocks are named at once, in less than a millisecond; others by a thread


@dataclass(slots=True, frozen=True, kw_only=True)
class DispatchLimits:
    num_retries: int = 3  # other decode workers tried before the first token
    num_migrations: int = 8  # decode workers lost and replaced after it; handovers don't count
    recovery_wait_s: float = 10.0  # a request that lost its worker waits this long for one to be ready


@dataclass(slots=True)
class NewTokens:
    """What came from the fleet; the last one has `finish_reason`. Not frozen, as `Output`."""

    tokens: list[SampledToken]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    prompt_logprobs: list[SampledToken] = field(default_factory=list)  # all of them come before the first token


@dataclass(slots=True)
class Progress:
    """What happened to one request so far; complete once its last tokens came."""

    report: types_pb2.RequestReport = field(default_factory=types_pb2.RequestReport)
    usage: types_pb2.Usage = field(default_factory=types_pb2.Usage)
    num_retries: int = 0  # other decode workers tried before the first token; the report counts prefill workers, too
    first_token_at: float | None = None
    last_token_at: float | None = None
    num_output_tokens: int = 0
    num_prompt_logprobs: int = 0  # that the caller has


@dataclass(slots=True)
class _Route:
    """What decides where a request goes next: its blocks, and the decode workers it was on (`Endpoint.incarnation`)."""

    block_names: Sequence[bytes]
    tried: set[tuple[str, str]] = field(default_factory=set)
    refused: set[tuple[str, str]] = field(default_factory=set)  # of `tried`, those that are there and said no

    def refuse(self, endpoint: Endpoint) -> None:
        self.tried.add(endpoint.incarnation)
        self.refused.add(endpoint.incarnation)


class _Pace:
    """How long a router waited for one stream's tokens after the first."""

    def __init__(self) -> None:
        self._asked_at = 0.0
        self.waited_s = 0.0
        self.num_tokens = 0

    def came(self, num_tokens: int, now: float) -> None:
        if self.num_tokens:
            self.waited_s += now - self._asked_at
        self.num_tokens += num_tokens

    def asks(self, now: float) -> None:
        """The caller has what came, and waits for more."""
        self._asked_at = now


class _WorkerLostError(Exception):
    """The decode worker cannot go on; another one may."""

    def __init__(self, code: str, reason: str, *, gone: bool, retry_after_s: float | None = None) -> None:
        super().__init__(f"{code}: {reason}")
        self.code = code
        self.retry_after_s = retry_after_s  # what a full worker asks for
        self.gone = gone  # no answer at all, rather than an answer that refuses


class _HandoverError(Exception):
    """The decode worker drains, and another one is there to go on."""

    def __init__(self, decision: RoutingDecision) -> None:
        super().__init__(decision.decode.address)
        self.decision = decision


class Dispatcher:
    """Shared by all requests of a router."""

    def __init__(
        self,
        registry: Registry,
        policy: Policy,
        *,
        limits: DispatchLimits | None = None,
        budget: RetryBudget | None = None,
        decisions: Decisions | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._registry = registry
        self.policy = policy  # another one may take its place at any time
        self._limits = limits or DispatchLimits()
        self._budget = budget or RetryBudget()
        self._decisions = decisions or Decisions()
        self._prefill_times = PrefillTimes()
        self._streams = DecodeStreams()
        self._clock = clock

    async def run(self, request: GenerationRequest, progress: Progress) -> AsyncGenerator[NewTokens, None]:
        """Yields tokens until one batch has a `finish_reason`; fills `progress` as it goes.

        Raises `UnavailableError` if no decode worker is left, `OverloadedError` if all refuse,
        `DeadlineError`, `SlowReaderError`, `InvalidArgumentError` if a worker refuses the request itself.
        """
        self._budget.request()
        sent: list[int] = []  # tokens that the caller has
        route = _Route(await _block_names(request))
        decision = await self._pick(request, route, progress, None)
        while True:
            progress.report.decode_worker = decision.decode.address
            try:
                async with aclosing(self._attempt(request, decision, sent, progress, route)) as attempt:
                    async for new in attempt:
                        sent += [token.token_id for token in new.tokens]
                        yield new
                        if new.finish_reason is not None:
                            return
            except _HandoverError as handover:
                decision = handover.decision
                self._count_handover(request, route, progress, decision)
            except _WorkerLostError as error:
                if not error.gone:
                    route.refuse(decision.decode)
                else:
                    route.tried.add(decision.decode.incarnation)
                    self._registry.suspect(*decision.decode.incarnation, str(error))
                if ended := _ended_by(request, sent):
                    yield ended
                    return
                self._allow_another(request, progress, error, has_tokens=bool(sent))
                decision = await self._pick(request, route, progress, error)

    async def _pick(
        self, request: GenerationRequest, route: _Route, progress: Progress, lost: _WorkerLostError | None
    ) -> RoutingDecision:
        """A first attempt finds a worker now, or waits a moment for one whose connection broke just now. A request that
        lost its worker prefers another one, takes the same one if it is back and there is no other, and waits a little
        for either."""
        give_up_at = self._clock() + (self._limits.recovery_wait_s if lost else self._registry.reconnect_wait_s())
        while True:
            try:
                decision = self._pick_once(request, route)
            except UnavailableError as error:
                if lost is not None and lost.code == FULL:
                    raise _overloaded(f"every decode worker is full ({lost})", lost) from error
                left = min(give_up_at, request.deadline) - self._clock()
                if left <= 0:
                    raise UnavailableError(f"{error.message}; {lost}" if lost else error.message) from error
                await self._registry.changed(left)
                continue
            cause = "new" if lost is None else "migration" if progress.num_output_tokens else "retry"
            self._note_decision(request, route, progress, decision, cause)
            return decision

    def _note_decision(
        self, request: GenerationRequest, route: _Route, progress: Progress, decision: RoutingDecision, cause: str
    ) -> None:
        """The request goes where `decision` says: its blocks will be there, and people may ask why."""
        metrics.router_decisions.labels("in_place" if decision.in_place else "remote").inc()
        metrics.router_expected_cached_tokens.inc(decision.num_cached_tokens)
        request.siblings.decode = request.siblings.decode or decision.decode.incarnation
        now, index = self._clock(), self._registry.blocks.index
        for address in _counted(decision):
            index.expect(address, route.block_names, now)
        log.debug("routed", extra={"request_id": request.request_id, "reasons": decision.reasons})
        if request.is_follow_up:
            return
        self._decisions.add(request, decision, cause)
        if request.explain:
            progress.report.routing.extend(f"{cause}: {reason}" for reason in bounded_reasons(decision))

    def _pick_once(self, request: GenerationRequest, route: _Route) -> RoutingDecision:
        endpoints = self._registry.endpoints()
        routing = RoutingRequest(
            num_prompt_tokens=len(request.prompt_token_ids),
            num_tokens=len(request.prompt_token_ids) + request.sampling_params.max_tokens,
            fingerprint=request.model.fingerprint,
            tried=frozenset(route.tried),
            cached_blocks=self._registry.blocks.index.match(route.block_names, self._clock()),
            session=request.session,
            beside=request.siblings.decode,
            parameters=_later_parameters(request.sampling_params),
            in_place=request.wants_prompt_logprobs,
        )
        try:
            return self.policy.pick(routing, endpoints)
        except UnavailableError:
            if route.tried == route.refused:
                raise
            return self.policy.pick(replace(routing, tried=frozenset(route.refused)), endpoints)

    def _allow_another(
        self, request: GenerationRequest, progress: Progress, lost: _WorkerLostError, *, has_tokens: bool
    ) -> None:
        """Counts the next attempt, or raises if there must be none."""
        report = progress.report
        within_budget = self._budget.spend(self._clock())
        extra = {"request_id": request.request_id, "decode_worker": report.decode_worker, "reason": str(lost)}
        if has_tokens:
            # A stream that a client already reads is not given up for the budget's sake.
            if report.num_migrations - report.num_handovers >= self._limits.num_migrations:
                raise UnavailableError(f"gave up after {report.num_migrations} migrations; last: {lost}") from lost
            report.num_migrations += 1
            metrics.router_migrations.labels(lost.code).inc()
            log.warning("decode worker lost, migrating", extra={**extra, "num_tokens": progress.num_output_tokens})
            return
        if not within_budget:
            metrics.router_retries_refused.inc()
            message = f"decode worker lost and the retry budget is spent; {lost}"
            raise (_overloaded(message, lost) if lost.code == FULL else UnavailableError(message)) from lost
        if progress.num_retries >= self._limits.num_retries:
            raise _given_up(lost, progress.num_retries) from lost
        progress.num_retries += 1
        report.num_retries += 1
        metrics.router_retries.labels(lost.code).inc()
        log.warning("decode worker lost, retrying", extra=extra)

    def _elsewhere(self, request: GenerationRequest, draining: Endpoint, route: _Route) -> RoutingDecision | None:
        """The worker that could go on instead of one that drains; None if none can now. The worker asks again."""
        route.refuse(draining)
        try:
            return self._pick_once(request, route)
        except UnavailableError:
            return None

    def _count_handover(
        self, request: GenerationRequest, route: _Route, progress: Progress, decision: RoutingDecision
    ) -> None:
        """Not from the retry budget: a drain is no fault, and happens once in a worker's life."""
        report = progress.report
        report.num_migrations += 1
        report.num_handovers += 1
        metrics.router_migrations.labels("drain").inc()
        self._note_decision(request, route, progress, decision, "handover")
        log.info(
            "decode worker drains, handing over",
            extra={
                "request_id": request.request_id,
                "decode_worker": report.decode_worker,
                "to": decision.decode.address,
                "num_tokens": progress.num_output_tokens,
            },
        )

    async def _attempt(
        self,
        request: GenerationRequest,
        decision: RoutingDecision,
        sent: list[int],
        progress: Progress,
        route: _Route,
    ) -> AsyncGenerator[NewTokens, None]:
        """One Decode call. Raises `_WorkerLostError` if another worker may do better, `_HandoverError` if one
        should."""
        timeout_s = request.deadline - self._clock()
        if timeout_s <= 0:
            raise DeadlineError("the request's deadline has passed")
        decode, earlier = decision.decode, progress.report
        events = DecodeEvents(request, len(sent), progress.num_prompt_logprobs)
        call = self._open(request, decision, sent, timeout_s)
        pace = _Pace()
        track, helpers = self._registry.track, () if decision.in_place else decision.prefill[:1]
        with (
            self._registry.sending(_counted(decision)),
            track.probing(decision.decode.incarnation),
            contextlib.ExitStack() as until_first_token,
        ):
            until_first_token.enter_context(track.probing(*(helper.incarnation for helper in helpers)))
            try:
                async with aclosing(call):
                    async for event in call:
                        now = self._clock()
                        if isinstance(event, list):  # most of an answer: tokens with nothing else to say
                            tokens = events.plain_tokens(event)
                            if not pace.num_tokens:
                                until_first_token.close()
                            pace.came(len(tokens), now)
                            _mark(progress, len(tokens), now)
                            yield NewTokens(tokens)
                            pace.asks(self._clock())
                            continue
                        pace.came(len(event.tokens), now)
                        if event.HasField("report"):
                            before, progress.report = progress.report, events.report(event.report, earlier)
                            progress.usage = events.usage(event.usage)
                            self._blame(decision, before, progress.report)
                        scores = events.prompt_logprobs(event) if event.prompt_logprobs else []
                        progress.num_prompt_logprobs += len(scores)
                        new = NewTokens(events.tokens(event), prompt_logprobs=scores)
                        if event.finish_reason:
                            new.finish_reason = finish_reason_of(event.finish_reason)
                            new.stop_token_id = event.stop_token_id if event.HasField("stop_token_id") else None
                        if new.tokens:
                            if pace.num_tokens == len(new.tokens):
                                until_first_token.close()
                            _mark(progress, len(new.tokens), now)
                        if new.finish_reason:
                            self._praise(decision, progress, len(request.prompt_token_ids), pace)
                        if new.tokens or new.finish_reason or scores:
                            yield new
                        if new.finish_reason:
                            return
                        if event.offers_handover and (elsewhere := self._elsewhere(request, decode, route)):
                            raise _HandoverError(elsewhere)
                        pace.asks(self._clock())
            except CallFailedError as error:
                failure = self._failure(request, decode, error)
                if isinstance(failure, _WorkerLostError) and failure.code not in NO_FAULTS:
                    self._registry.track.failed(decode.incarnation, self._clock())
                raise failure from error
            except FalseEventError as error:
                metrics.router_false_workers.labels("tokens").inc()
                extra = {"request_id": request.request_id, "decode_worker": decode.address, "reason": str(error)}
                log.error("a decode worker says what cannot be", extra=extra)
                self._registry.track.failed(decode.incarnation, self._clock())
                raise _WorkerLostError("INTERNAL", f"{decode.address} {error}", gone=False) from error
        raise _WorkerLostError("UNAVAILABLE", "the stream ended without a finish reason", gone=True)

    def _blame(
        self, decision: RoutingDecision, before: types_pb2.RequestReport, after: types_pb2.RequestReport
    ) -> None:
        """Prefill workers that the decode worker could not go on with; asking others comes from the budget."""
        now = self._clock()
        num_failed = max(after.num_retries - before.num_retries, 0)
        num_late = max(after.num_hedges_won - before.num_hedges_won, 0)
        for endpoint in [*decision.prefill[:num_failed], *decision.prefill[: min(num_late, 1)]]:
            self._registry.track.failed(endpoint.incarnation, now)
        for _ in range(min(num_failed + max(after.num_hedges - before.num_hedges, 0), len(decision.prefill))):
            self._budget.spend(now)

    def _praise(self, decision: RoutingDecision, progress: Progress, num_prompt_tokens: int, pace: _Pace) -> None:
        """The answer is complete: its workers did well, but for a prefill worker that the decode worker blames."""
        now, track, report = self._clock(), self._registry.track, progress.report
        decode, cached = decision.decode.incarnation, progress.usage.cached_tokens
        track.succeeded(decode, now, pace.num_tokens, pace.waited_s)
        track.answered(decode, now, prompt=num_prompt_tokens, cached=cached, output=pace.num_tokens)
        if decision.prefill and report.prefill_worker == decision.prefill[0].address:
            elapsed_ms = report.timings.prefill_queue_ms + report.timings.prefill_ms
            self._prefill_times.came(decision.prefill_cost, elapsed_ms / 1000)
        for endpoint in decision.prefill:
            if endpoint.address == report.prefill_worker:
                track.succeeded(endpoint.incarnation, now)
            elif report.fallback_reason.startswith(f"prefill worker {endpoint.address}: "):
                track.failed(endpoint.incarnation, now)

    def _open(
        self, request: GenerationRequest, decision: RoutingDecision, sent: list[int], timeout_s: float
    ) -> DecodeCall | SingleCall:
        address = decision.decode.address
        try:
            channel = self._registry.channel(address)
        except KeyError:  # between the choice and now
            raise _WorkerLostError("UNAVAILABLE", f"{address} is no worker any more", gone=True) from None
        # The others are asked if the first one fails. Without them the decode worker computes the prompt.
        num_named = None if self._budget.allows(self._clock()) else 1
        may_hedge = decision.may_hedge and num_named is None
        hedge_after_s = self._prefill_times.late_s(decision.prefill_cost) if may_hedge else None
        request.charge.num_tokens = 0
        return self._streams.call(
            channel,
            decision.decode.incarnation,
            decode_pb2.DecodeRequest(
                request_id=request.request_id,
                fingerprint=request.model.fingerprint,
                prompt_token_ids=request.prompt_token_ids,
                sampling_params=message_of(request.sampling_params, types_pb2.SamplingParams),
                cache_salt=request.cache_salt,
                retain=None if request.retain is None else message_of(request.retain, types_pb2.Retain),
                tenant=name_of(request.client, request.tenant),
                priority=request.priority,
                prefill_addresses=[endpoint.address for endpoint in decision.prefill[:num_named]],
                output_token_ids=sent,
                min_remote_tokens=decision.min_remote_tokens,
                hedge_after_s=hedge_after_s,
            ),
            timeout_s,
        )

    def _failure(self, request: GenerationRequest, decode: Endpoint, error: CallFailedError) -> Exception:
        """What a failed call means: the request's own fault, its deadline, or a worker to be replaced."""
        code, details = error.code, error.details
        if code == "DEADLINE_EXCEEDED" and self._clock() >= request.deadline - 0.05:
            return DeadlineError("the request's deadline passed before it was finished")
        fault = error_of_call(code, details, error.metadata)
        if code == "INVALID_ARGUMENT":
            return InvalidArgumentError(request.client_field(fault.field), fault.reason)
        if code == "ABORTED":
            return SlowReaderError(fault.reason)
        if code == "INTERNAL" and "RST_STREAM" not in details:
            log.error("decode worker failed", extra={"request_id": request.request_id, "reason": details})
        gone = code == "UNAVAILABLE"
        reason = f"{decode.address}: {details[:MAX_WORDS]}"
        return _WorkerLostError(code, reason, gone=gone, retry_after_s=fault.retry_after_s)


def _mark(progress: Progress, num_tokens: int, now: float) -> None:
    if progress.first_token_at is None:
        progress.first_token_at = now
    progress.last_token_at = now
    progress.num_output_tokens += num_tokens


def _later_parameters(params: SamplingParams) -> frozenset[str]:
    """Those that `params` needs and an older worker would not notice."""
    return frozenset(name for name in LATER_PARAMETERS if getattr(params, name) != parameters()[name].default)


def _counted(decision: RoutingDecision) -> dict[str, int]:
    """Workers that this request is load on, until they say so themselves, and the prompt tokens that they compute."""
    missing = decision.num_missing_tokens
    if decision.in_place or not decision.prefill:
        return {decision.decode.address: missing}
    return {decision.decode.address: 0, decision.prefill[0].address: missing}


async def _block_names(request: GenerationRequest) -> Sequence[bytes]:
    """Of the prompt's full blocks that need not be computed if they are found: its last token always is."""
    model, token_ids = request.model, request.prompt_token_ids
    name = partial(
        block_hashes,
        root_hash(model.fingerprint),
        token_ids[: len(token_ids) - 1],
        model.block_size,
        extra_keys(cache_salt=request.cache_salt),
    )
    return name() if len(token_ids) <= MAX_TOKENS_HERE else await asyncio.to_thread(name)


def _overloaded(message: str, lost: _WorkerLostError) -> OverloadedError:
    return OverloadedError(message) if lost.retry_after_s is None else OverloadedError(message, lost.retry_after_s)


def _given_up(lost: _WorkerLostError, num_retries: int) -> BatonError:
    message = f"gave up after {num_retries} retries; last: {lost}"
    if lost.code == FULL:
        return _overloaded(message, lost)
    if lost.code in ("INTERNAL", "UNKNOWN"):
        return InternalError(message)
    return UnavailableError(message)


def _ended_by(request: GenerationRequest, sent: list[int]) -> NewTokens | None:
    """The end that a lost worker did not get to announce: nothing was left to generate."""
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
