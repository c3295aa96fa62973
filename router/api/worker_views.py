"""What a router knows of its workers beside what they say themselves: joined from all of its processes."""

from __future__ import annotations

import time
from dataclasses import dataclass

from router.fleet.registry import Registry
from router.fleet.track_record import Traffic
from router.processes.process_query import ProcessQuery
from router.processes.router_process import RouterProcess

BREAKERS = ("closed", "half open", "slow", "open")  # what keeps more requests away comes later


@dataclass(slots=True)
class WorkerView:
    """What one process of a router knows of a worker, or all of them together."""

    address: str
    breaker: str = BREAKERS[0]
    num_known_blocks: int = 0
    prompt_tokens: float = 0.0
    cached_tokens: float = 0.0
    output_tokens: float = 0.0
    num_requests: int = 0  # that the router has running on it

    @property
    def hit_rate(self) -> float:
        return self._traffic.hit_rate

    @property
    def tokens_per_second(self) -> float:
        return self._traffic.tokens_per_second

    @property
    def _traffic(self) -> Traffic:
        return Traffic(self.prompt_tokens, self.cached_tokens, self.output_tokens)

    def add(self, other: WorkerView) -> None:
        """Joins another process's view: what they sent there is summed, and the breaker told is the one that lets least
        through."""
        self.breaker = max(self.breaker, other.breaker, key=BREAKERS.index)
        self.num_known_blocks = max(self.num_known_blocks, other.num_known_blocks)
        self.prompt_tokens += other.prompt_tokens
        self.cached_tokens += other.cached_tokens
        self.output_tokens += other.output_tokens
        self.num_requests += other.num_requests


class WorkerViews:
    def __init__(self, registry: Registry, process: RouterProcess) -> None:
        self._registry = registry
        self._process = process
        self._query = ProcessQuery("workers", WorkerView, self._own)
        process.answers(self._query)

    async def joined(self) -> dict[str, WorkerView]:
        """By address."""
        found: dict[str, WorkerView] = {}
        for view in await self._process.ask(self._query):
            found.setdefault(view.address, WorkerView(view.address)).add(view)
        return found

    def _own(self, *_: object) -> list[WorkerView]:
        now, registry = time.monotonic(), self._registry
        views = []
        for endpoint in registry.endpoints():
            traffic = registry.track.traffic(endpoint.incarnation, now)
            views.append(
                WorkerView(
                    endpoint.address,
                    registry.track.state(endpoint.incarnation, now),
                    registry.blocks.index.num_blocks(endpoint.address),
                    traffic.prompt,
                    traffic.cached,
                    traffic.output,
                    registry.num_requests(endpoint.address),
                )
            )
        return views
