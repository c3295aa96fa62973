"""One process of a router, with what all processes of the router share. This version is the only one of its router, and
shares nothing.

`router.processes.member` is one of several (`--processes`).
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable

from prometheus_client import REGISTRY, Metric

from common.config import RouterSettings
from common.logs import flip_debug, order_level
from common.process.tasks import VitalTasks
from router.limits.demand import Demand
from router.limits.ledger import Ledger, LocalLedger
from router.limits.request_queue import Places, RequestQueue
from router.processes.process_query import ProcessQuery, T
from router.running.decisions import Decisions
from router.running.known_requests import KnownRequests


class RouterProcess:
    """The one process of a router: where it listens, what its requests take of limits and queue, what was decided."""

    is_one_of_several = False
    is_replacement = False  # others serve already: this one should not be asked before it can answer

    def __init__(self, settings: RouterSettings) -> None:
        self.http_listen = settings.http_listen
        self.grpc_listen = settings.grpc_listen
        self.health_listen = settings.health_listen
        self.endpoint_picker_listen = settings.endpoint_picker_listen
        self.pick_key = secrets.token_bytes(32)  # of this start of the router (`router.running.picks`)
        self.max_connections = settings.max_connections
        self.ledger: Ledger = LocalLedger()
        self.demand = Demand()
        self.decisions = Decisions()
        self.requests = KnownRequests()
        self.queue: Places = RequestQueue(
            settings.max_running, max_waiting=settings.max_queued, max_wait_s=settings.max_queue_wait
        )

    async def start(self, vital: VitalTasks) -> None:
        """Call it before any other method."""

    def takes_signals(self) -> None:
        """Signals have handlers from now on."""

    def flip_debug(self) -> None:
        """SIGUSR1: shows debug lines, or shows them no longer."""
        flip_debug()

    def order_level(self, level: str) -> None:
        """Which log lines the router shows from now on, whatever was asked for before."""
        order_level(level)

    def not_ready(self, own_reason: str) -> str:
        """Why the router as a whole is not ready to take requests; empty if it is ready. `own_reason` is this process's
        own reason, empty if it is ready."""
        return own_reason

    def metrics(self) -> Iterable[Metric]:
        """The metrics of the router."""
        return REGISTRY.collect()

    def answers(self, query: ProcessQuery[T]) -> None:
        """Has this process answer this query from now on."""

    async def ask(self, query: ProcessQuery[T], limit: int = 0, tenant: str | None = None, which: str = "") -> list[T]:
        """The answers of all processes of the router."""
        return await query.told(limit, tenant, which)
