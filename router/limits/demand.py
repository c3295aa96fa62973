"""A router's demand, for autoscalers: traffic as it arrives, and requests that wait for a first worker."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator, Callable, Iterator

import grpc

from protos.baton.v1 import demand_pb2

MIN_INTERVAL_S = 0.05
MAX_INTERVAL_S = 1.0


class Demand:
    """Counters of one router process. Totals only grow."""

    def __init__(self) -> None:
        self._epoch = secrets.token_hex(8)
        self.num_running = 0  # with those that wait
        self.num_waiting = 0
        self.num_of_batches = 0  # of those that run
        self.changed: Callable[[], None] = lambda: None  # called when `num_of_clients` may have changed
        self.num_requests = 0
        self.num_prompt_tokens = 0
        self.num_output_tokens = 0
        self.num_unserved = 0
        self._news = asyncio.Event()

    @property
    def num_of_clients(self) -> int:
        """Requests that run or wait and are of no batch, in all processes of the router."""
        return self.num_running - self.num_of_batches

    def arrived(self) -> None:
        self.num_requests += 1
        self.tell()

    def prompt(self, num_tokens: int) -> None:
        self.num_prompt_tokens += num_tokens
        self.tell()

    def unserved(self) -> None:
        self.num_unserved += 1
        self.tell()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Use it around the time in which one request waits for a first worker."""
        self.num_waiting += 1
        self.tell()
        try:
            yield
        finally:
            self.num_waiting -= 1
            self.tell()

    def tell(self) -> None:
        self._news.set()

    async def news(self) -> None:
        """Returns after a change, or when it is time to report again."""
        self._news.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(MAX_INTERVAL_S):
                await self._news.wait()

    def to_proto(self) -> demand_pb2.RouterDemand:
        return demand_pb2.RouterDemand(
            epoch=self._epoch,
            num_requests_running=self.num_running - self.num_waiting,
            num_requests_waiting=self.num_waiting,
            num_requests_total=self.num_requests,
            num_prompt_tokens_total=self.num_prompt_tokens,
            num_output_tokens_total=self.num_output_tokens,
            num_requests_unserved_total=self.num_unserved,
        )


class DemandService:
    """`baton.v1.DemandService`."""

    def __init__(self, demand: Demand) -> None:
        self._demand = demand

    async def WatchDemand(  # noqa: N802
        self, _request: demand_pb2.WatchDemandRequest, _context: grpc.aio.ServicerContext[object, object]
    ) -> AsyncGenerator[demand_pb2.RouterDemand, None]:
        while True:
            yield self._demand.to_proto()
            await asyncio.sleep(MIN_INTERVAL_S)
            await self._demand.news()
