"""The requests of one router process, for people and pages that ask: those that have not ended (`/ui`), and the last
that ended (`/requests`)."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from common.finished_request import FinishedAttempt, FinishedRequest
from router.processes.process_query import ProcessQuery
from router.running.request import AnyRequest, Progress
from router.running.timeline import ms, stages

MAX_FINISHED = 512  # kept
TOLD_AT_ONCE = 16  # what is told of one takes some 60 us to make
MAX_REASON_CHARS = 500  # a reason may name each worker of a fleet


@dataclass(slots=True, frozen=True, kw_only=True)
class RunningRequest:
    """Fields are named as those of `FinishedRequest`."""

    request_id: str
    time: float  # when it came, in seconds since 1970
    client: str  # name of the API key
    model: str
    phase: str  # "queued" in the router, "prefill" until its first token, "decode"
    prompt_tokens: int
    output_tokens: int  # so far
    prefill_worker: str  # that was chosen for the prompt; empty if the decode worker computes it
    decode_worker: str  # empty while it is queued
    ttft_ms: float | None
    total_ms: float  # so far


class Abortable(Protocol):
    def abort(self, reason: str) -> bool:
        """Ends the request. Returns False if it has ended already."""


@dataclass(slots=True, frozen=True)
class Ending:
    """How a request ended."""

    status: str
    reason: str = ""
    finish_reason: str = ""


@dataclass(slots=True, frozen=True)
class Pace:
    """How fast an answer came."""

    ttft_ms: float
    tpot_ms: float | None  # mean time between two tokens; None if it has one


@dataclass(slots=True)
class _Kept:
    """What `FinishedRequest` is made of, without the prompt."""

    request_id: str
    trace_id: str
    tenant: str
    client: str
    model: str
    operation: str
    num_prompt_tokens: int
    arrived_at: float
    came_at: float  # the same, in seconds since 1970
    ended_at: float
    progress: Progress
    ending: Ending
    told: FinishedRequest | None = None  # made once, for the first who asks


class KnownRequests:
    """Those that run, and a ring of those that ended. What is told of the latter is made when somebody first asks, and
    kept."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, wall_clock: Callable[[], float] = time.time
    ) -> None:
        self.query = ProcessQuery("requests", FinishedRequest, self.finished, self.prepare)
        self._clock = clock
        self._wall_clock = wall_clock
        # Clients may choose equal request ids.
        self._running: dict[int, tuple[AnyRequest, Progress, Abortable]] = {}
        self._kept: deque[_Kept] = deque(maxlen=MAX_FINISHED)

    def began(self, request: AnyRequest, progress: Progress, work: Abortable) -> None:
        self._running[id(progress)] = request, progress, work

    def left(self, progress: Progress) -> None:
        """The request runs no longer, and nothing is told of its end."""
        self._running.pop(id(progress), None)

    def ended(self, request: AnyRequest, progress: Progress, ending: Ending) -> None:
        """Nobody changes `progress` any more."""
        self._running.pop(id(progress), None)
        now = self._clock()
        self._kept.append(
            _Kept(
                request_id=request.request_id,
                trace_id="" if request.traced is None else request.traced.own.trace_id,
                tenant=request.client.tenant,
                client=request.client.name,
                model=request.model.limits.model,
                operation=request.operation,
                num_prompt_tokens=request.num_prompt_tokens,
                arrived_at=request.arrived_at,
                came_at=self._wall_clock() - (now - request.arrived_at),
                ended_at=now,
                progress=progress,
                ending=replace(ending, reason=ending.reason[:MAX_REASON_CHARS]),
            )
        )

    def abort(self, request_id: str, reason: str) -> int:
        """Ends the requests of this id. Returns how many there were."""
        found = [work for request, _, work in self._running.values() if request.request_id == request_id]
        return sum([work.abort(reason) for work in found])

    def running(self, limit: int) -> list[RunningRequest]:
        """Those that have not ended, the newest first."""
        now, wall_now = self._clock(), self._wall_clock()
        found = itertools.islice(reversed(self._running.values()), limit)
        return [_described_running(request, progress, now, wall_now) for request, progress, _ in found]

    def handoffs(self, older_s: float) -> Counter[tuple[str, str]]:
        """How many requests wait for their first token from a prefill worker for more than `older_s` seconds, by the
        addresses of that worker and of the decode worker."""
        before, found = self._clock() - older_s, Counter[tuple[str, str]]()
        for _request, progress, _work in self._running.values():
            if not progress.attempts:
                continue
            last = progress.attempts[-1]
            if last.prefill_worker and last.first_token_at is None and last.started_at < before:
                found[last.prefill_worker, last.decode_worker] += 1
        return found

    async def prepare(self, limit: int, tenant: str | None = None, request_id: str = "") -> None:
        """Makes what `finished` is about to tell, some at a time: meanwhile others have their turn."""
        untold = [kept for kept in self._latest(limit, tenant, request_id) if kept.told is None]
        for number, kept in enumerate(untold, start=1):
            _told(kept)
            if number % TOLD_AT_ONCE == 0:
                await asyncio.sleep(0)

    def finished(self, limit: int, tenant: str | None = None, request_id: str = "") -> list[FinishedRequest]:
        """Those that ended, the latest first; with `tenant` only those of its requests, with `request_id` only those of
        that id."""
        return [_told(kept) for kept in self._latest(limit, tenant, request_id)]

    def _latest(self, limit: int, tenant: str | None, request_id: str) -> list[_Kept]:
        found = (
            kept
            for kept in reversed(self._kept)
            if (tenant is None or kept.tenant == tenant) and (not request_id or kept.request_id == request_id)
        )
        return list(itertools.islice(found, limit))

    def paces(self, latest_s: float) -> list[Pace]:
        """Of the answers that became complete in the last `latest_s` seconds."""
        since, found = self._clock() - latest_s, []
        for kept in reversed(self._kept):
            if kept.ended_at < since:
                break
            first = kept.progress.first_token_at
            if kept.ending.status == "ok" and first is not None and not kept.progress.num_pauses:
                found.append(Pace(1000 * (first - kept.arrived_at), kept.progress.tpot_ms))
        return found


def _described_running(request: AnyRequest, progress: Progress, now: float, wall_now: float) -> RunningRequest:
    last, first_at = progress.attempts[-1] if progress.attempts else None, progress.first_token_at
    return RunningRequest(
        request_id=request.request_id,
        time=wall_now - (now - request.arrived_at),
        client=request.client.name,
        model=request.model.limits.model,
        phase="queued" if last is None else "prefill" if first_at is None else "decode",
        prompt_tokens=request.num_prompt_tokens,
        output_tokens=progress.num_output_tokens,
        prefill_worker="" if last is None else last.prefill_worker,
        decode_worker="" if last is None else last.decode_worker,
        ttft_ms=None if first_at is None else round(1000 * (first_at - request.arrived_at), 1),
        total_ms=round(1000 * (now - request.arrived_at), 1),
    )


def _told(kept: _Kept) -> FinishedRequest:
    if kept.told is None:
        kept.told = _described(kept)
    return kept.told


def _described(kept: _Kept) -> FinishedRequest:
    progress, ending = kept.progress, kept.ending
    report, timings, slo = progress.report, progress.report.timings, progress.report.slo
    first_token_at, arrived_at = progress.first_token_at, kept.arrived_at
    return FinishedRequest(
        request_id=kept.request_id,
        trace_id=kept.trace_id,
        time=kept.came_at,
        client=kept.client,
        model=kept.model,
        operation=kept.operation,
        status=ending.status,
        reason=ending.reason,
        finish_reason=ending.finish_reason,
        prompt_tokens=kept.num_prompt_tokens,
        cached_tokens=progress.usage.cached_tokens,
        output_tokens=progress.usage.completion_tokens or progress.num_output_tokens,
        decode_worker=report.decode_worker,
        prefill_worker=report.prefill_worker,
        ttft_ms=None if first_token_at is None else ms(first_token_at - arrived_at),
        total_ms=ms(kept.ended_at - arrived_at),
        router_queue_ms=ms(progress.queue_s),
        queue_ms=round(timings.queue_ms, 3),
        prefill_queue_ms=round(timings.prefill_queue_ms, 3),
        prefill_ms=round(timings.prefill_ms, 3),
        handoff_ms=round(timings.handoff_ms, 3),
        transfer_ms=round(timings.transfer_ms, 3),
        tail_ms=round(timings.tail_ms, 3),
        first_decode_ms=round(timings.first_decode_ms, 3),
        tokens_per_second=round(timings.tokens_per_second, 3),
        num_retries=report.num_retries,
        num_migrations=report.num_migrations,
        num_handovers=report.num_handovers,
        num_hedges=report.num_hedges,
        num_hedges_won=report.num_hedges_won,
        num_preemptions=report.num_preemptions,
        num_blocks_moved=report.num_blocks_moved,
        num_bytes_moved=report.num_bytes_moved,
        num_blocks_lent=report.num_blocks_lent,
        num_drafted_tokens=report.num_drafted_tokens,
        num_accepted_tokens=report.num_accepted_tokens,
        fallback_reason=report.fallback_reason,
        tpot_ms=None if progress.tpot_ms is None else round(progress.tpot_ms, 3),
        slo_class=slo.slo_class,
        ttft_target_ms=slo.targets.ttft_ms if slo.targets.HasField("ttft_ms") else None,
        tpot_target_ms=slo.targets.tpot_ms if slo.targets.HasField("tpot_ms") else None,
        ttft_met=slo.ttft_met if slo.HasField("ttft_met") else None,
        tpot_met=slo.tpot_met if slo.HasField("tpot_met") else None,
        attempts=tuple(
            FinishedAttempt(
                cause=attempt.cause,
                decode_worker=attempt.decode_worker,
                start_ms=ms(attempt.started_at - arrived_at),
                end_ms=ms((attempt.ended_at or kept.ended_at) - arrived_at),
                first_token_ms=None if attempt.first_token_at is None else ms(attempt.first_token_at - arrived_at),
                failure=attempt.failure[:MAX_REASON_CHARS],
            )
            for attempt in progress.attempts
        ),
        stages=stages(progress, arrived_at, kept.ended_at),
    )
