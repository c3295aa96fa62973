"""The stages of a request that ended: what took its time, and where."""

from __future__ import annotations

from collections.abc import Iterator

from common.finished_request import Stage
from router.running.request import Progress

ROUTER = "router"


def stages(progress: Progress, arrived_at: float, ended_at: float) -> tuple[Stage, ...]:
    """The stages of a request that ended, in order; those that took no time are left out. `arrived_at` and `ended_at`
    are seconds of the monotonic clock."""
    return tuple(
        Stage(name=name, where=where, start_ms=ms(start - arrived_at), end_ms=ms(end - arrived_at))
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


def ms(seconds: float) -> float:
    """Of a number of seconds, as it is told."""
    return round(1000 * seconds, 3)
