"""One attempt of a request on one decode worker: its tokens as they come, and what an incomplete end means.

An attempt ends with the complete answer, with an error of the request's own, or with an error that means that another
worker may do better (`WorkerLostError`, `HandoverError`): then `dispatch` continues on another worker. Attempts also
note how workers did.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

from common import metrics
from common.errors import DeadlineError
from common.retry_budget import RetryBudget
from common.tracing import TraceContext
from protos.baton.v1 import decode_pb2, types_pb2
from protos.convert import finish_reason_of
from protos.messages import message_of
from router.fleet.decode_call import CallFailedError, DecodeCall, SingleCall
from router.fleet.decode_stream import DecodeStreams
from router.fleet.endpoint import Endpoint
from router.fleet.registry import Registry
from router.fleet.track_record import MIN_TOKENS
from router.policy.base import RoutingDecision
from router.policy.costs import first_token_s
from router.running.decode_events import DecodeEvents, FalseEventError, PrefillBlame
from router.running.first_token_times import FirstTokenTimes
from router.running.prefill_times import LikePrompts, PrefillTimes
from router.running.request import GenerationRequest, NewTokens, Progress
from router.running.retries import NO_FAULTS, WorkerLostError, failure_of
from router.running.routes import load_of

log = logging.getLogger(__name__)

COMPARE_EVERY = 8  # complete answers: to predict one again takes longer than all else that is counted of it


class HandoverError(Exception):
    """The decode worker drains, and another one is there to go on."""

    def __init__(self, decision: RoutingDecision) -> None:
        super().__init__(decision.decode.address)
        self.decision = decision


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
        """The caller has taken what came, and waits for more."""
        self._asked_at = now


class Attempts:
    """The attempts of all requests of a router."""

    def __init__(
        self,
        registry: Registry,
        budget: RetryBudget,
        clock: Callable[[], float] = time.monotonic,
        first_tokens: FirstTokenTimes | None = None,
    ) -> None:
        """`first_tokens` is told how predictions came true."""
        self._registry = registry
        self._first_tokens = first_tokens or FirstTokenTimes()
        self._budget = budget
        self._clock = clock
        self._prefill_times, self._like_prompts = PrefillTimes(), LikePrompts()
        self._streams = DecodeStreams()
        self._num_complete = 0  # answers

    async def run(
        self,
        request: GenerationRequest,
        decision: RoutingDecision,
        sent: list[int],
        progress: Progress,
        elsewhere: Callable[[], RoutingDecision | None],
    ) -> AsyncGenerator[NewTokens, None]:
        """Yields tokens after those that were `sent` to the caller, until some have a `finish_reason`; fills
        `progress`. `elsewhere` names a worker for the request if the present one offers to hand it over.

        Raises `WorkerLostError` if another worker may do better, `HandoverError` if one should; `DeadlineError`,
        `SlowReaderError`, `InvalidArgumentError` if the request itself cannot go on.
        """
        timeout_s = request.deadline - self._clock()
        if timeout_s <= 0:
            raise DeadlineError("the request's deadline has passed")
        decode, earlier = decision.decode, progress.report
        events = DecodeEvents(request, len(sent), progress.num_prompt_logprobs)
        context = progress.attempts[-1].context if progress.attempts else None
        call = self._open(request, decision, sent, timeout_s, context)
        pace, blame = _Pace(), PrefillBlame(decision.prefill)
        track, helpers = self._registry.track, () if decision.in_place else decision.prefill[:1]
        with (
            self._registry.sending(
                load_of(decision), request.request_id, decision.slack_s, request.num_prompt_tokens + len(sent)
            ),
            track.probing(decode.incarnation),
            track.probing(*[helper.incarnation for helper in helpers]) as until_first_token,
        ):
            try:
                async with aclosing(call):
                    async for event in call:
                        now = self._clock()
                        if isinstance(event, list):  # most of an answer: tokens with nothing else to say
                            tokens = events.plain_tokens(event)
                            if not pace.num_tokens:
                                until_first_token.close()
                                self._begins(decision, progress, now)
                            pace.came(len(tokens), now)
                            progress.came(len(tokens), now)
                            yield NewTokens(tokens)
                            pace.asks(self._clock())
                            continue
                        pace.came(len(event.tokens), now)
                        if event.HasField("report"):
                            before, progress.report = progress.report, events.report(event.report, earlier)
                            progress.usage = events.usage(event.usage)
                            self._blame(blame.told(event))
                            self._pay(decision, before, progress.report)
                        new = _new_tokens(events, event)
                        progress.num_prompt_logprobs += len(new.prompt_logprobs)
                        if new.tokens:
                            if pace.num_tokens == len(new.tokens):
                                until_first_token.close()
                                self._begins(decision, progress, now)
                            progress.came(len(new.tokens), now)
                        if new.finish_reason:
                            self._praise(decision, progress, len(request.prompt_token_ids), pace, blame)
                        if new.tokens or new.finish_reason or new.prompt_logprobs:
                            yield new
                        if new.finish_reason:
                            return
                        if event.offers_handover and (other := elsewhere()):
                            raise HandoverError(other)
                        pace.asks(self._clock())
            except CallFailedError as error:
                failure = failure_of(
                    error.code,
                    error.details,
                    error.metadata,
                    address=decode.address,
                    request_id=request.request_id,
                    left_s=request.deadline - self._clock(),
                    client_field=request.client_field,
                )
                if isinstance(failure, WorkerLostError) and failure.code not in NO_FAULTS:
                    track.failed(decode.incarnation, self._clock())
                raise failure from error
            except FalseEventError as error:
                metrics.router_false_workers.labels("tokens").inc()
                extra = {"request_id": request.request_id, "decode_worker": decode.address, "reason": str(error)}
                log.error("a decode worker says what cannot be", extra=extra)
                track.failed(decode.incarnation, self._clock())
                raise WorkerLostError("INTERNAL", f"{decode.address} {error}", gone=False) from error
        raise WorkerLostError("UNAVAILABLE", "the stream ended without a finish reason", gone=True)

    def _open(
        self,
        request: GenerationRequest,
        decision: RoutingDecision,
        sent: list[int],
        timeout_s: float,
        context: TraceContext | None,
    ) -> DecodeCall | SingleCall:
        address = decision.decode.address
        try:
            channel = self._registry.channel(address)
        except KeyError:  # between the choice and now
            raise WorkerLostError("UNAVAILABLE", f"{address} is no worker any more", gone=True) from None
        # The decode worker asks further prefill workers if the first fails. If the budget is spent it gets only one,
        # and computes the prompt itself if that one fails.
        num_named = None if self._budget.allows(self._clock()) else 1
        if num_named is not None and len(decision.prefill) > num_named:
            metrics.router_spares_withheld.inc()
        may_hedge = decision.may_hedge and num_named is None
        hedge_after_s = self._prefill_times.late_s(decision.prefill_cost, decision.prefill_s) if may_hedge else None
        request.charge.worker_was_asked = True
        targets = request.slo.targets
        return self._streams.call(
            channel,
            decision.decode.incarnation,
            decode_pb2.DecodeRequest(
                request_id=request.request_id,
                fingerprint=request.model.fingerprint,
                prompt_token_ids=request.prompt_token_ids,
                sampling_params=request.sampling_messages.of(request.sampling_params),
                cache_salt=request.cache_salt,
                retain=None if request.retain is None else message_of(request.retain, types_pb2.Retain),
                tenant=request.client.owner,
                priority=request.priority,
                targets=None if targets is None else message_of(targets, types_pb2.LatencyTargets),
                age_ms=1000 * max(self._clock() - request.arrived_at, 0.0),
                is_follow_up=request.is_follow_up,
                prefill_addresses=[endpoint.address for endpoint in decision.prefill[:num_named]],
                output_token_ids=sent,
                min_remote_tokens=decision.min_remote_tokens,
                split_at=decision.split_at,
                hedge_after_s=hedge_after_s,
                traceparent="" if context is None else context.traceparent,
                tracestate="" if context is None else context.state,
            ),
            timeout_s,
        )

    def _begins(self, decision: RoutingDecision, progress: Progress, now: float) -> None:
        """The first token of an attempt came."""
        progress.begins(now)
        attempt = progress.attempts[-1] if progress.attempts else None
        if decision.first_token_s is not None and attempt is not None:
            self._first_tokens.came(decision.first_token_s, now - attempt.started_at)

    def _blame(self, prefill: Sequence[Endpoint]) -> None:
        """Blames prefill workers that the decode worker could not go on with."""
        for endpoint in prefill:
            self._registry.track.failed(endpoint.incarnation, self._clock())

    def _pay(self, decision: RoutingDecision, before: types_pb2.RequestReport, after: types_pb2.RequestReport) -> None:
        """Takes from the budget the prefill workers that were asked in place of others, or beside them."""
        num_retries = max(after.num_retries - before.num_retries, 0)
        num_hedges = max(after.num_hedges - before.num_hedges, 0)
        for _ in range(min(num_retries + num_hedges, len(decision.prefill))):
            self._budget.spend(self._clock())

    def _praise(
        self,
        decision: RoutingDecision,
        progress: Progress,
        num_prompt_tokens: int,
        pace: _Pace,
        blame: PrefillBlame,
    ) -> None:
        """After a complete answer, notes that its workers did well, except a prefill worker that the decode worker
        blames."""
        now, track, report = self._clock(), self._registry.track, progress.report
        decode, cached = decision.decode.incarnation, progress.usage.cached_tokens
        track.succeeded(decode, now, pace.num_tokens, pace.waited_s, decision.step_s)
        track.answered(decode, now, prompt=num_prompt_tokens, cached=cached, output=pace.num_tokens)
        self._num_complete += 1
        if self._num_complete % COMPARE_EVERY == 1:
            _compare(decision, progress, num_prompt_tokens, pace)
        elapsed_s = (report.timings.prefill_queue_ms + report.timings.prefill_ms) / 1000
        has_work = decision.num_missing_tokens > 0  # else it had its part of a split prompt already
        if has_work and decision.prefill and report.prefill_worker == decision.prefill[0].address:
            self._prefill_times.came(decision.prefill_cost, elapsed_s, decision.prefill_s)
            self._first_tokens.handed_over(decision.num_missing_tokens, report.timings.handoff_ms / 1000, now)
        for endpoint in decision.prefill:
            if endpoint in blame:
                continue
            if endpoint.address == report.prefill_worker:
                track.succeeded(endpoint.incarnation, now)
                if endpoint is decision.prefill[0] and elapsed_s and has_work:
                    times = self._like_prompts.times_usual(
                        decision.prefill_cost, num_prompt_tokens, elapsed_s, decision.prefill_s
                    )
                    if times is not None:
                        track.prefilled(endpoint.incarnation, now, times)
            elif report.fallback_reason.startswith(f"prefill worker {endpoint.address}: "):
                track.failed(endpoint.incarnation, now)


def _compare(decision: RoutingDecision, progress: Progress, num_prompt_tokens: int, pace: _Pace) -> None:
    """Counts what was measured beside what the decision's workers predicted, if all of them did."""
    if decision.step_s is None:
        return
    if pace.num_tokens >= MIN_TOKENS and decision.step_s > 0:
        measured_s = pace.waited_s / (pace.num_tokens - 1)
        metrics.router_prediction.labels("token").observe(measured_s / decision.step_s)
    attempt = progress.attempts[-1] if progress.attempts else None
    if attempt is None or attempt.cause != "new" or attempt.first_token_at is None or decision.split_at:
        return
    computes, missing = decision.decode if decision.in_place else decision.prefill[0], decision.num_missing_tokens
    predicted_s = first_token_s(computes, missing, num_prompt_tokens - missing)
    if predicted_s > 0:
        metrics.router_prediction.labels("first_token").observe(
            (attempt.first_token_at - attempt.started_at) / predicted_s
        )


def _new_tokens(events: DecodeEvents, event: decode_pb2.DecodeEvent) -> NewTokens:
    """Raises `FalseEventError`."""
    scores = events.prompt_logprobs(event) if event.prompt_logprobs else []
    new = NewTokens(events.tokens(event), prompt_logprobs=scores)
    if event.finish_reason:
        new.finish_reason = finish_reason_of(event.finish_reason)
        new.stop_token_id = event.stop_token_id if event.HasField("stop_token_id") else None
    return new
