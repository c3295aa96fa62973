"""State that the processes of a router share. This version is for a single process, and shares nothing.

`router.processes.member` is the same for a router of several processes (`--processes`).
"""

from __future__ import annotations

from prometheus_client import generate_latest

from common.config import RouterSettings
from common.process.tasks import VitalTasks
from router.limits.demand import Demand
from router.limits.fair_queue import FairQueue, Places
from router.limits.ledger import Ledger, LocalLedger
from router.processes.question import Question, T
from router.running.decisions import Decisions


class Part:
    """The state of a router with one process."""

    is_one_of_several = False
    is_replacement = False  # others serve already: this one should not be asked before it can answer

    def __init__(self, settings: RouterSettings) -> None:
        self.http_listen = settings.http_listen
        self.grpc_listen = settings.grpc_listen
        self.health_listen = settings.health_listen
        self.max_connections = settings.max_connections
        self.ledger: Ledger = LocalLedger()
        self.demand = Demand()
        self.decisions = Decisions()
        self.queue: Places = FairQueue(
            settings.max_running, max_waiting=settings.max_queued, max_wait_s=settings.max_queue_wait
        )

    async def start(self, vital: VitalTasks) -> None:
        """Call it before any other method."""

    def takes_signals(self) -> None:
        """Signals have handlers from now on."""

    def not_ready(self, own_reason: str) -> str:
        """Why the router as a whole is not ready to take requests; empty if it is ready. `own_reason` is this process's
        own reason, empty if it is ready."""
        return own_reason

    def metrics_page(self) -> bytes:
        """The metrics of the router, as text for Prometheus."""
        return generate_latest()

    def answers(self, question: Question[T]) -> None:
        """Has this process answer this question from now on."""

    async def ask(self, question: Question[T], limit: int = 0, tenant: str | None = None) -> list[T]:
        """The answers of all processes of the router."""
        return question.tell(limit, tenant)
