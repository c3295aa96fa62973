"""When a worker is lost: whether another one is asked for the same work, and which error the client gets if not.

Answers and embeddings share this, and one budget (`common.retry_budget`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from common import metrics
from common.errors import (
    AbortedError,
    BatonError,
    DeadlineError,
    InternalError,
    InvalidArgumentError,
    OverloadedError,
    SlowReaderError,
    UnavailableError,
)
from common.grpc.options import DEADLINE_SLACK_S
from common.grpc.status import Metadata, error_of_call
from common.peers import MAX_WORDS
from common.retry_budget import RetryBudget
from router.fleet.endpoint import Endpoint
from router.fleet.registry import Registry
from router.running.routes import Route

log = logging.getLogger(__name__)

FULL = "RESOURCE_EXHAUSTED"
NO_FAULTS = (FULL, "FAILED_PRECONDITION", "DEADLINE_EXCEEDED", "CANCELLED")  # of a worker that does not go on

PickT = TypeVar("PickT")


class WorkerLostError(Exception):
    """The worker cannot go on; another one may."""

    def __init__(self, code: str, reason: str, *, gone: bool, retry_after_s: float | None = None) -> None:
        super().__init__(f"{code}: {reason}")
        self.code = code
        self.retry_after_s = retry_after_s  # what a full worker asks for
        self.gone = gone  # no answer at all, rather than an answer that refuses


@dataclass(slots=True, frozen=True, kw_only=True)
class DispatchLimits:
    num_retries: int = 3  # other workers tried before the first token, or for an embedding
    num_migrations: int = 8  # decode workers lost and replaced after it; handovers don't count
    recovery_wait_s: float = 10.0  # a request that lost its worker waits this long for one to be ready


class Retries:
    """Shared by all requests of a router."""

    def __init__(
        self,
        registry: Registry,
        limits: DispatchLimits | None = None,
        budget: RetryBudget | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = limits or DispatchLimits()
        self.budget = budget or RetryBudget()
        self._registry = registry
        self._clock = clock

    def lost(self, route: Route, endpoint: Endpoint, error: WorkerLostError) -> None:
        """The request does not go to `endpoint` again, unless it is another process by then."""
        if error.gone:
            route.tried.add(endpoint.incarnation)
            self._registry.suspect(*endpoint.incarnation, str(error))
        else:
            route.refuse(endpoint)

    def allow(self, num_retries: int, error: WorkerLostError) -> None:
        """Counts one more retry, after `num_retries` of the same work; raises `BatonError` if there must be none."""
        if num_retries >= self.limits.num_retries:
            raise _given_up(error, num_retries) from error
        if not self.budget.spend(self._clock()):
            metrics.router_retries_refused.inc()
            message = f"worker lost and the retry budget is spent; {error}"
            raise (_overloaded(message, error) if error.code == FULL else UnavailableError(message)) from error
        metrics.router_retries.labels(error.code).inc()

    async def pick(self, pick: Callable[[], PickT], deadline: float, lost: WorkerLostError | None) -> PickT:
        """What `pick` returns. If it raises `UnavailableError`, a first attempt waits a moment for a worker whose
        connection has just broken, and one after `lost` waits longer for any worker. Raises `BatonError`."""
        give_up_at: float | None = None
        while True:
            try:
                return pick()
            except UnavailableError as error:
                if lost is not None and lost.code == FULL:
                    raise _overloaded(f"every worker that could take it is full ({lost})", lost) from error
                if give_up_at is None:
                    wait_s = self.limits.recovery_wait_s if lost else self._registry.reconnect_wait_s()
                    give_up_at = self._clock() + wait_s
                left = min(give_up_at, deadline) - self._clock()
                if left <= 0:
                    raise UnavailableError(f"{error.message}; {lost}" if lost else error.message) from error
                await self._registry.changed(left)


def failure_of(
    code: str,
    details: str,
    metadata: Metadata | None,
    *,
    address: str,
    request_id: str,
    left_s: float,
    client_field: Callable[[str], str],
) -> BatonError | WorkerLostError:
    """The error for a failed call of the worker at `address`: the request's own fault, its deadline, or a worker to be
    replaced. `left_s`: to the request's deadline. `client_field`: from a field's name to the client's name for it."""
    if code == "DEADLINE_EXCEEDED" and left_s <= DEADLINE_SLACK_S:
        return DeadlineError("the request's deadline passed before it was finished")
    fault = error_of_call(code, details, metadata)
    if code == "INVALID_ARGUMENT":
        return InvalidArgumentError(client_field(fault.field), fault.reason)
    if code == "ABORTED":
        return fault if isinstance(fault, AbortedError) else SlowReaderError(fault.reason)
    if code == "INTERNAL" and "RST_STREAM" not in details:
        log.error("worker failed", extra={"request_id": request_id, "reason": details})
    reason = f"{address}: {details[:MAX_WORDS]}"
    return WorkerLostError(code, reason, gone=code == "UNAVAILABLE", retry_after_s=fault.retry_after_s)


def _overloaded(message: str, lost: WorkerLostError) -> OverloadedError:
    return OverloadedError(message) if lost.retry_after_s is None else OverloadedError(message, lost.retry_after_s)


def _given_up(lost: WorkerLostError, num_retries: int) -> BatonError:
    message = f"gave up after {num_retries} retries; last: {lost}"
    if lost.code == FULL:
        return _overloaded(message, lost)
    if lost.code in ("INTERNAL", "UNKNOWN"):
        return InternalError(message)
    return UnavailableError(message)
