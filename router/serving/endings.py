"""What is told of each request when it ends: to metrics, to the log, and to those who ask later (`/requests`)."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Sequence

from prometheus_client import Counter

from common import metrics
from common.errors import AbortedError, BatonError
from common.grpc.options import DEADLINE_SLACK_S
from common.tracing import Span, SpanSink, Traced
from common.types import FinishReason
from router.limits.targets import NO_SLO
from router.running.embedding import EmbedRequest
from router.running.known_requests import Ending, KnownRequests
from router.running.request import AnyRequest, GenerationRequest, Progress
from router.running.slo import count_outcome, exceeds, facts_of, note_outcome
from router.running.timeline import in_words, stages
from router.serving.request_spans import embedding_spans, request_spans

log = logging.getLogger(__name__)


class Endings:
    """Shared by all requests of a router process."""

    def __init__(
        self,
        requests: KnownRequests | None = None,
        *,
        slow_s: float | None = None,
        slow_factor: float | None = None,
        spans: SpanSink | None = None,
        with_content: bool = False,
    ) -> None:
        """`slow_s`: a request that takes longer has its timeline in the log; None: none has. `slow_factor`: so has one
        that takes longer than so many times one of its latency targets. `spans` takes those of
        requests that are traced, `with_content` with prompts and answers."""
        self.requests = requests or KnownRequests()
        self._slow_s = slow_s
        self._slow_factor = slow_factor
        self._spans = spans
        self._with_content = with_content

    def watching(self, request: AnyRequest, progress: Progress) -> _Watching:
        """Use it around all work for one answer: tells how the request ended if it did not end well."""
        if self._with_content and request.traced is not None:
            progress.texts = []
        return _Watching(self, request, progress)

    def answered(self, request: GenerationRequest, progress: Progress, finish_reason: FinishReason) -> None:
        """The answer is complete, and so is its report (`complete`)."""
        _observe(request, progress)
        self._told("answered", request, progress, Ending("ok", finish_reason=finish_reason.value))

    def embedded(self, request: EmbedRequest, progress: Progress) -> None:
        """All of its embeddings are there."""
        progress.usage.prompt_tokens = request.num_prompt_tokens
        self._told("answered", request, progress, Ending("ok"))

    def unfinished(self, request: AnyRequest, progress: Progress, ending: Ending) -> None:
        if isinstance(request, GenerationRequest) and request.slo is not NO_SLO:
            note_outcome(request, progress, ending.status, time.monotonic())
        how = "cancelled" if ending.status in ("cancelled", "deadline_exceeded") else "failed"
        self._told(how, request, progress, ending)

    def _told(self, how: str, request: AnyRequest, progress: Progress, ending: Ending) -> None:
        progress.has_ended = True
        _ended(ending.finish_reason or ending.status).inc()
        if progress.report.HasField("slo"):
            count_outcome(progress, ending.status)
        self.requests.ended(request, progress, ending)
        now = time.monotonic()
        if request.traced is not None and self._spans is not None:
            self._spans.export(_spans(request.traced, request, progress, ending, now))
            progress.texts = None  # spans alone tell them
        if self._is_slow(request, progress, now):
            timeline = in_words(stages(progress, request.arrived_at, now))
            log.warning("slow request", extra={**_facts(request, progress, ending, now), "timeline": timeline})
        elif log.isEnabledFor(logging.INFO):
            log.info(how, extra=_facts(request, progress, ending, now))

    def _is_slow(self, request: AnyRequest, progress: Progress, now: float) -> bool:
        if self._slow_s is not None and now - request.arrived_at > self._slow_s:
            return True
        if self._slow_factor is None or not isinstance(request, GenerationRequest):
            return False
        return exceeds(request, progress, self._slow_factor, now)


class _Watching:
    """A generator would cost each request more."""

    __slots__ = ("_endings", "_num_cancels", "_progress", "_request", "_task")

    def __init__(self, endings: Endings, request: AnyRequest, progress: Progress) -> None:
        self._endings = endings
        self._request = request
        self._progress = progress
        self._task = asyncio.current_task()
        self._num_cancels: int | None = None  # of the task, before this cancelled it

    def __enter__(self) -> None:
        self._endings.requests.began(self._request, self._progress, self)

    def abort(self, reason: str) -> bool:
        """See `Abortable`. What the request waits for is cancelled; while its reader has a piece of its answer, it ends
        when the next one is asked for."""
        progress = self._progress
        if progress.has_ended or progress.abort_reason or self._task is None:
            return False
        progress.abort_reason = reason
        if not progress.is_with_reader:
            self._num_cancels = self._task.cancelling()
            self._task.cancel()
        return True

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self._num_cancels is not None and self._task is not None:
            is_ours = self._task.uncancel() <= self._num_cancels  # and of nobody else who stops this task
            if is_ours and kind is asyncio.CancelledError:
                aborted = AbortedError(self._progress.abort_reason)
                self._end(aborted)
                raise aborted from None
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        if self._progress.has_ended:
            return
        if error is None:  # its reader left before the end
            self._endings.requests.left(self._progress)
            return
        if isinstance(error, BatonError):
            ending = Ending(error.grpc_code.lower(), error.message)
            if isinstance(error, AbortedError):
                metrics.router_aborted.inc()
        elif isinstance(error, asyncio.CancelledError | GeneratorExit):
            # gRPC tells a deadline like a cancel.
            is_late = time.monotonic() >= self._request.deadline - DEADLINE_SLACK_S
            late, gone = Ending("deadline_exceeded", "its deadline has passed"), Ending("cancelled", "by its client")
            ending = late if is_late else gone
        else:
            ending = Ending("internal", type(error).__name__)
        self._endings.unfinished(self._request, self._progress, ending)


def _spans(traced: Traced, request: AnyRequest, progress: Progress, ending: Ending, now: float) -> Sequence[Span]:
    if isinstance(request, GenerationRequest):
        return request_spans(traced, request, progress, ending, now)
    return embedding_spans(traced, request, progress, ending, now)


def complete(request: GenerationRequest, progress: Progress, num_tokens: int, num_reasoning_tokens: int) -> None:
    """Adds to the report what only the router knows."""
    now = time.monotonic()
    first = now if progress.first_token_at is None else progress.first_token_at
    last = now if progress.last_token_at is None else progress.last_token_at
    rest_s = last - first
    timings, usage = progress.report.timings, progress.usage
    progress.report.notes[:] = request.notes
    timings.router_queue_ms = 1000 * progress.queue_s
    timings.ttft_ms = 1000 * (first - request.arrived_at)
    timings.total_ms = 1000 * (last - request.arrived_at)
    timings.tokens_per_second = (num_tokens - 1) / rest_s if num_tokens > 1 and rest_s > 0 else 0.0
    usage.prompt_tokens = len(request.prompt_token_ids)
    usage.completion_tokens = num_tokens
    usage.reasoning_tokens = num_reasoning_tokens
    if request.slo is not NO_SLO:
        note_outcome(request, progress, "ok", now)


def _observe(request: GenerationRequest, progress: Progress) -> None:
    timings, usage = progress.report.timings, progress.usage
    exemplar = None if request.traced is None else {"trace_id": request.traced.own.trace_id}
    rest_ms = timings.total_ms - timings.ttft_ms
    metrics.router_prompt_tokens.observe(usage.prompt_tokens)
    metrics.router_output_tokens.observe(usage.completion_tokens)
    metrics.router_cached_tokens.inc(usage.cached_tokens)
    if progress.report.fallback_reason:
        metrics.router_fallbacks.inc()
    if progress.num_pauses:  # its times are those of others
        return
    metrics.router_ttft.observe(timings.ttft_ms / 1000, exemplar)
    metrics.router_e2e.observe(timings.total_ms / 1000, exemplar)
    if usage.completion_tokens > 1:
        metrics.router_tpot.observe(rest_ms / 1000 / (usage.completion_tokens - 1), exemplar)
    _stage("router_queue").inc(progress.queue_s)
    _stage("queue").inc(timings.queue_ms / 1000)
    _stage("prefill").inc(timings.prefill_ms / 1000)
    _stage("handoff").inc(timings.handoff_ms / 1000)
    _stage("decode").inc(rest_ms / 1000)


@functools.cache
def _ended(reason: str) -> Counter:
    return metrics.router_answers.labels(reason)


@functools.cache
def _stage(name: str) -> Counter:
    return metrics.router_stages.labels(name)


_COUNTS = ("num_retries", "num_migrations", "num_handovers", "num_hedges", "num_preemptions")


def _facts(request: AnyRequest, progress: Progress, ending: Ending, now: float) -> dict[str, object]:
    """What the line of a request has; what did not happen is left out."""
    report, timings = progress.report, progress.report.timings
    first = progress.first_token_at
    facts: dict[str, object] = {
        "request_id": request.request_id,
        "status": ending.status,
        "reason": ending.reason or ending.finish_reason,
        "decode_worker": report.decode_worker,
        "prefill_worker": report.prefill_worker,
        "prompt_tokens": request.num_prompt_tokens,
        "cached_tokens": progress.usage.cached_tokens,
        "output_tokens": progress.usage.completion_tokens or progress.num_output_tokens,
        "queue_ms": round(1000 * progress.queue_s + timings.queue_ms, 1),
        "prefill_ms": round(timings.prefill_ms, 1),
        "handoff_ms": round(timings.handoff_ms, 1),
        "total_ms": round(1000 * (now - request.arrived_at), 1),
    }
    if first is not None:
        facts["ttft_ms"] = round(1000 * (first - request.arrived_at), 1)
    if request.traced is not None:
        facts["trace_id"] = request.traced.own.trace_id
    if request.client.name:
        facts["client"] = request.client.name
    if report.HasField("slo"):
        facts |= facts_of(report.slo)
    if progress.num_inputs:
        facts["num_inputs"] = progress.num_inputs
    if report.fallback_reason:
        facts["fallback_reason"] = report.fallback_reason
    return facts | {name: count for name in _COUNTS if (count := getattr(report, name))}
