"""The last routing decisions with their reasons, for people who ask why (`/decisions`)."""

from __future__ import annotations

import itertools
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from router.policy.base import Reasons, RoutingDecision
from router.processes.process_query import ProcessQuery
from router.running.request import GenerationRequest

MAX_DECISIONS = 512  # kept
MAX_REASONS = 32  # of one decision
MAX_REASON_CHARS = 500


@dataclass(slots=True, frozen=True, kw_only=True)
class Decision:
    """Fields are those of the page. Nothing of a prompt but its length."""

    time: float  # seconds since 1970
    request_id: str
    client: str  # name of the API key
    cause: str  # "new", "retry", "migration", "handover", "resumed"; "refused": it would have gone there, but too late
    prompt_tokens: int
    cached_tokens: int  # that the decode worker was thought to have
    decode_worker: str
    prefill_workers: tuple[str, ...]  # in the order in which they are asked
    in_place: bool
    reasons: tuple[str, ...]


class Decisions:
    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self.query = ProcessQuery("decisions", Decision, self.latest)
        self._kept: deque[tuple[str, partial[Decision], Reasons]] = deque(maxlen=MAX_DECISIONS)  # with their tenants

    def add(self, request: GenerationRequest, decision: RoutingDecision, cause: str) -> None:
        made = partial(
            Decision,
            time=self._clock(),
            request_id=request.request_id,
            client=request.client.name,
            cause=cause,
            prompt_tokens=len(request.prompt_token_ids),
            cached_tokens=decision.num_cached_tokens,
            decode_worker=decision.decode.address,
            prefill_workers=tuple([endpoint.address for endpoint in decision.prefill]),
            in_place=decision.in_place,
        )
        reasons = decision.reasons
        if len(reasons.passed_over) > MAX_REASONS:  # of a large fleet: nobody is told of the others
            reasons = Reasons(reasons.passed_over[-MAX_REASONS:], reasons.choices)
        self._kept.append((request.client.tenant, made, reasons))

    def latest(self, limit: int, tenant: str | None = None, _which: str = "") -> list[Decision]:
        """Made now, since few are asked for. The newest first; with `tenant` only those of its requests."""
        found = (kept[1:] for kept in reversed(self._kept) if tenant is None or kept[0] == tenant)
        return [made(reasons=bounded_lines(reasons)) for made, reasons in itertools.islice(found, limit)]

    def handoffs(self, latest_s: float) -> Counter[tuple[str, str]]:
        """How many requests of the last `latest_s` seconds went to a prefill worker first, by the addresses of that
        worker and of the decode worker."""
        since, found = self._clock() - latest_s, Counter[tuple[str, str]]()
        for _tenant, made, _reasons in reversed(self._kept):
            told = made.keywords
            if told["time"] < since:
                break
            if told["prefill_workers"] and not told["in_place"] and told["cause"] != "refused":
                found[told["prefill_workers"][0], told["decode_worker"]] += 1
        return found


def bounded_lines(reasons: Reasons) -> tuple[str, ...]:
    """Choices come last in a decision, so its first lines are the ones left out."""
    return tuple(line[:MAX_REASON_CHARS] for line in reasons.lines()[-MAX_REASONS:])
