"""The requests that have not ended, for people who look at a router (`/ui`)."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from router.running.request import AnyRequest, Progress


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


class InFlight:
    """Those of one router process."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, wall_clock: Callable[[], float] = time.time
    ) -> None:
        self._clock = clock
        self._wall_clock = wall_clock
        # Clients may choose equal request ids.
        self._running: dict[int, tuple[AnyRequest, Progress, Abortable]] = {}

    def began(self, request: AnyRequest, progress: Progress, work: Abortable) -> None:
        self._running[id(progress)] = request, progress, work

    def ended(self, progress: Progress) -> None:
        self._running.pop(id(progress), None)

    def abort(self, request_id: str, reason: str) -> int:
        """Ends the requests of this id. Returns how many there were."""
        found = [work for request, _, work in self._running.values() if request.request_id == request_id]
        return sum([work.abort(reason) for work in found])

    def latest(self, limit: int) -> list[RunningRequest]:
        """The newest first."""
        now, wall_now = self._clock(), self._wall_clock()
        found = itertools.islice(reversed(self._running.values()), limit)
        return [_told(request, progress, now, wall_now) for request, progress, _ in found]

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


def _told(request: AnyRequest, progress: Progress, now: float, wall_now: float) -> RunningRequest:
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
