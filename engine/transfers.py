"""KV transfers of the engine's requests: which job belongs to whom, and which blocks it keeps from being reused.

A block that a connector reads or writes is held in the block manager until its result has come. So an aborted
request's destination blocks stay quarantined for as long as bytes may land in them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from engine.block_manager import BlockManager
from kv_store.base import FetchBlock, KVConnector, LocalBlock, TransferResult


@dataclass(slots=True)
class _Job:
    request_id: str
    num_due: int  # blocks whose results are due
    start: float  # seconds, on the caller's clock


class Transfers:
    def __init__(self, connector: KVConnector, blocks: BlockManager, clock: Callable[[], float]) -> None:
        self._connector = connector
        self._blocks = blocks
        self._clock = clock
        self._next_job = 0
        self._jobs: dict[int, _Job] = {}
        self._published: dict[str, list[int]] = {}  # request id: its publish jobs

    @property
    def num_in_flight(self) -> int:
        """Blocks whose results are due."""
        return sum(job.num_due for job in self._jobs.values())

    def publish(self, request_id: str, blocks: Sequence[LocalBlock]) -> None:
        job_id = self._start(request_id, [block.block_id for block in blocks])
        self._published.setdefault(request_id, []).append(job_id)
        self._connector.publish(job_id, blocks)

    def fetch(self, request_id: str, blocks: Sequence[FetchBlock]) -> None:
        if blocks:
            self._connector.fetch(self._start(request_id, [block.block_id for block in blocks]), blocks)

    def poll(self) -> Iterator[tuple[str, TransferResult, float]]:
        """Request id, result and seconds since its start of each block whose transfer ended; the block is not held
        any more."""
        now = self._clock()
        for result in self._connector.poll():
            job = self._jobs[result.job_id]
            job.num_due -= 1
            if job.num_due == 0:
                del self._jobs[result.job_id]
            self._blocks.unhold(result.block_id)
            yield job.request_id, result, now - job.start

    def release(self, request_id: str) -> None:
        """The lease on everything that the request published has ended."""
        for job_id in self._published.pop(request_id, ()):
            self._connector.release(job_id)

    def _start(self, request_id: str, block_ids: list[int]) -> int:
        self._next_job += 1
        self._jobs[self._next_job] = _Job(request_id, len(block_ids), self._clock())
        self._blocks.hold(block_ids)
        return self._next_job
