"""Demand for autoscalers, of a router with several processes: each process reports that of all."""

from __future__ import annotations

import asyncio

from protos.baton.v1 import demand_pb2
from router.limits.demand import MIN_INTERVAL_S, Demand
from router.processes.shared_ledger import TOTAL, SharedLedger

RUNNING, WAITING = "running requests", "waiting requests"
REQUESTS, PROMPT_TOKENS = f"{TOTAL}requests", f"{TOTAL}prompt tokens"
OUTPUT_TOKENS, UNSERVED = f"{TOTAL}output tokens", f"{TOTAL}unserved requests"


class SharedDemand(Demand):
    """Writes its own counters to the ledger every MIN_INTERVAL_S, so its sums are at most that old."""

    def __init__(self, ledger: SharedLedger, epoch: str) -> None:
        super().__init__()
        self._epoch = epoch
        self._ledger = ledger

    async def keep_shared(self) -> None:
        """Writes the counters until it is cancelled."""
        told = None
        while True:
            self._share()
            sums = self.to_proto()
            if sums != told:
                told = sums
                self.tell()
            await asyncio.sleep(MIN_INTERVAL_S)

    def _share(self) -> None:
        self._ledger.put(
            {
                RUNNING: self.num_running,
                WAITING: self.num_waiting,
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
