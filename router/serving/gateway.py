"""What every interface does with a request: admit it, prepare it, generate its answer.

gRPC and REST translate to `Prompt` and `GivenSampling` and from `Output`; nothing else differs between them.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.finished_request import FinishedRequest
from router.limits.admission import Admission
from router.preparing.preparation import Preparation
from router.processes.router_process import RouterProcess
from router.running.decisions import Decision
from router.running.prefix_hints import PrefixHints
from router.running.routes import Routes
from router.serving.embeddings import Embeddings
from router.serving.generation import Generation


@dataclass(slots=True, frozen=True)
class Gateway:
    """Shared by both interfaces of a router."""

    admission: Admission
    preparation: Preparation
    generation: Generation
    routes: Routes
    embeddings: Embeddings
    prefix_hints: PrefixHints
    process: RouterProcess
    also_reasoning: bool = False  # see `RouterSettings`
    per_request_metrics: bool = False  # likewise
    metrics_aliases: str = "none"  # likewise

    def not_ready(self) -> str:
        """Why the router takes no request now; empty if it does."""
        return self.process.not_ready(self.admission.not_ready())

    async def latest_decisions(self, limit: int, tenant: str | None) -> list[Decision]:
        """The newest first; with `tenant` only those of its requests."""
        made = await self.process.ask(self.process.decisions.query, limit, tenant)
        return sorted(made, key=lambda decision: decision.time, reverse=True)[:limit]

    async def latest_requests(self, limit: int, tenant: str | None, request_id: str = "") -> list[FinishedRequest]:
        """Those that ended, the latest first; with `tenant` only those of its requests, with
        `request_id` only those of that id."""
        told = await self.process.ask(self.process.requests.query, limit, tenant, request_id)
        return sorted(told, key=lambda request: request.time + request.total_ms / 1000, reverse=True)[:limit]
