"""Demand for autoscalers, of a router with several processes: each process reports that of all."""

from __future__ import annotations

import asyncio

from protos.baton.v1 import demand_pb2
from router.limits.demand import MIN_INTERVAL_S, Demand
from router.processes.shared_ledger import TOTAL, SharedLedger

RUNNING, WAITING, OF_BATCHES = "running requests", "waiting requests", "running requests of batches"
REQUESTS, PROMPT_TOKENS = f"{TOTAL}requests", f"{TOTAL}prompt tokens"
OUTPUT_TOKENS, UNSERVED = f"{TOTAL}output tokens", f"{TOTAL}unserved requests"


class SharedDemand(Demand):
    """Writes its own counters to the ledger every MIN_INTERVAL_S, so its sums are at most that old."""

    def __init__(self, ledger: SharedLedger, epoch: str) -> None:
        super().__init__()
        self._epoch = epoch
        self._ledger = ledger
        self._num_elsewhere = 0  # requests of clients in other processes

    async def keep_shared(self) -> None:
        """Writes the counters until it is cancelled."""
        told = None
        while True:
            self._share()
            if (elsewhere := self._clients_elsewhere()) != self._num_elsewhere:
                self._num_elsewhere = elsewhere
                self.changed()
            sums = self.to_proto()
            if sums != told:
                told = sums
                self.tell()
            await asyncio.sleep(MIN_INTERVAL_S)

    @property
    def num_of_clients(self) -> int:
        return super().num_of_clients + self._num_elsewhere

    def _clients_elsewhere(self) -> int:
        """Just after `_share`, so that the sums have this process's numbers as they are."""
        return max(0, self._ledger.total(RUNNING) - self._ledger.total(OF_BATCHES) - super().num_of_clients)

    def _share(self) -> None:
        self._ledger.put(
            {
                RUNNING: self.num_running,
                WAITING: self.num_waiting,
                OF_BATCHES: self.num_of_batches,
                REQUESTS: self.num_requests,
                PROMPT_TOKENS: self.num_prompt_tokens,
                OUTPUT_TOKENS: self.num_output_tokens,
                UNSERVED: self.num_unserved,
            }
        )

    def to_proto(self) -> demand_pb2.RouterDemand:
        total = self._ledger.total
        waiting = total(WAITING)
        return demand_pb2.RouterDemand(
            epoch=self._epoch,
            num_requests_running=max(0, total(RUNNING) - waiting),
            num_requests_waiting=waiting,
            num_requests_total=total(REQUESTS),
            num_prompt_tokens_total=total(PROMPT_TOKENS),
            num_output_tokens_total=total(OUTPUT_TOKENS),
            num_requests_unserved_total=total(UNSERVED),
        )
