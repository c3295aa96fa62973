"""The last requests that ended, and what took their time, for people and pages that ask (`/requests`)."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from common.finished_request import FinishedAttempt, FinishedRequest, Stage
from router.processes.process_query import ProcessQuery
from router.running.request import AnyRequest, Progress

MAX_FINISHED = 512  # kept
TOLD_AT_ONCE = 16  # what is told of one takes some 60 us to make
MAX_REASON_CHARS = 500  # a reason may name each worker of a fleet
ROUTER = "router"


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


class Finished:
    """A ring of requests. What is told of each is made when somebody first asks, and kept."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, wall_clock: Callable[[], float] = time.time
    ) -> None:
        self.query = ProcessQuery("requests", FinishedRequest, self.latest, self.prepare)
        self._clock = clock
        self._wall_clock = wall_clock
        self._kept: deque[_Kept] = deque(maxlen=MAX_FINISHED)

    def add(self, request: AnyRequest, progress: Progress, ending: Ending) -> None:
        """Nobody changes `progress` any more."""
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

    async def prepare(self, limit: int, tenant: str | None = None, request_id: str = "") -> None:
        """Makes what `latest` is about to tell, some at a time: meanwhile others have their turn."""
        untold = [kept for kept in self._latest(limit, tenant, request_id) if kept.told is None]
        for number, kept in enumerate(untold, start=1):
            _told(kept)
            if number % TOLD_AT_ONCE == 0:
                await asyncio.sleep(0)

    def latest(self, limit: int, tenant: str | None = None, request_id: str = "") -> list[FinishedRequest]:
        """The newest first; with `tenant` only those of its requests, with `request_id` only those of that id."""
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
        ttft_ms=None if first_token_at is None else _ms(first_token_at - arrived_at),
        total_ms=_ms(kept.ended_at - arrived_at),
        router_queue_ms=_ms(progress.queue_s),
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
                start_ms=_ms(attempt.started_at - arrived_at),
                end_ms=_ms((attempt.ended_at or kept.ended_at) - arrived_at),
                first_token_ms=None if attempt.first_token_at is None else _ms(attempt.first_token_at - arrived_at),
                failure=attempt.failure[:MAX_REASON_CHARS],
            )
            for attempt in progress.attempts
        ),
        stages=stages(progress, arrived_at, kept.ended_at),
    )


def stages(progress: Progress, arrived_at: float, ended_at: float) -> tuple[Stage, ...]:
    """The stages of a request that ended, in order; those that took no time are left out. `arrived_at` and `ended_at`
    are seconds of the monotonic clock."""
    return tuple(
        Stage(name=name, where=where, start_ms=_ms(start - arrived_at), end_ms=_ms(end - arrived_at))
        for name, where, start, end in _stretches(progress, arrived_at, ended_at)
        if end > start
    )


_Stretch = tuple[str, str, float, float]


def _stretches(progress: Progress, arrived_at: float, ended_at: float) -> Iterator[_Stretch]:
    queued_at = ended_at if progress.queued_at is None else progress.queued_at
    turn_at = ended_at if progress.turn_at is None else progress.turn_at
    yield "prepare", ROUTER, arrived_at, queued_at
    yield "router queue", ROUTER, queued_at, turn_at
    if progress.num_inputs:
        for attempt in progress.attempts:
            name = "failed attempt" if attempt.failure else "embed"
            yield name, attempt.decode_worker, attempt.started_at, attempt.ended_at or ended_at
        return
    free_at = turn_at
    for attempt in progress.attempts:
        yield "route", ROUTER, free_at, attempt.started_at
        if attempt.ended_at is not None:
            yield "failed attempt", attempt.decode_worker, attempt.started_at, attempt.ended_at
            free_at = attempt.ended_at
    if not progress.attempts or progress.attempts[-1].ended_at is not None:
        yield "route", ROUTER, free_at, ended_at
        return
    yield from _on_workers(progress, progress.attempts[-1].started_at, ended_at)


def _on_workers(progress: Progress, started_at: float, ended_at: float) -> Iterator[_Stretch]:
    """Stages of the last attempt, by the report of its decode worker."""
    report, timings, first = progress.report, progress.report.timings, progress.attempts[-1].first_token_at
    decode, prefill = report.decode_worker, report.prefill_worker or report.decode_worker
    before = [
        ("queue", decode, timings.queue_ms - timings.prefill_queue_ms),
        ("prefill queue", prefill, timings.prefill_queue_ms),
        ("prefill", prefill, timings.prefill_ms),
    ]
    handoff, after = ("handoff", decode, timings.handoff_ms), [("first decode", decode, timings.first_decode_ms)]
    if report.num_tail_tokens:  # the handoff comes before the first token
        before += [handoff, ("tail", decode, timings.tail_ms)]
    else:
        after.insert(0, handoff)
    end = ended_at if first is None else first
    at = started_at
    for name, where, took_ms in before:
        until = min(at + max(took_ms, 0.0) / 1000, end)
        yield name, where, at, until
        at = until
    if first is None:
        yield "no token yet", decode, at, ended_at
        return
    yield "to the router", ROUTER, at, first
    last = ended_at if progress.last_token_at is None else progress.last_token_at
    at = first
    for name, where, took_ms in after:
        until = min(at + took_ms / 1000, last)
        yield name, where, at, until
        at = until
    yield "decode", decode, at, last


def in_words(found: tuple[Stage, ...]) -> str:
    """The timeline in one line, for the log."""
    return ", ".join(f"{one.name} {one.end_ms - one.start_ms:.1f} ms ({one.where})" for one in found)


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 3)
