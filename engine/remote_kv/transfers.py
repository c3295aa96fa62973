"""KV transfers of the engine: which request each job belongs to, and which blocks the job holds. Pure: the connectors
move the bytes.

Two connectors: one hands a prompt's KV from a prefill worker to a decode worker, the other is the store. They may be
the same one, and job ids are unique across both. A block that a connector reads or writes is held in the block manager
until its final result has come. So the destination blocks of an aborted request stay quarantined for as long as bytes
may land in them. The blocks of a transfer that hangs stay quarantined too, while its request goes on with other blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from engine.blocks.block_manager import BlockManager
from kv_store.base import FetchBlock, KVConnector, LocalBlock, TransferResult


@dataclass(slots=True)
class OverdueTransfers:
    """Transfers of one request that have failed but may still move bytes."""

    results: list[TransferResult] = field(default_factory=list)
    elapsed_s: float = 0.0  # since the start of the oldest


_Key = tuple[int, int, int]  # of a result: job, index, block


def _key(result: TransferResult) -> _Key:
    return result.job_id, result.index, result.block_id


@dataclass(slots=True)
class _Job:
    request_id: str  # empty for a write to the store, which belongs to no request
    num_due: int  # blocks whose results are due
    start: float  # seconds, on the caller's clock


@dataclass(slots=True, frozen=True)
class EndedTransfer:
    """The end of one block's transfer for a request."""

    request_id: str
    result: TransferResult
    elapsed_s: float  # since the start of its job


@dataclass(slots=True, frozen=True)
class WrittenBlock:
    """The end of a write to the store. `error` is None if the store holds the block now."""

    block_hash: bytes
    error: str | None
    num_bytes: int  # 0 if the store had it already


class Transfers:
    def __init__(
        self, handoff: KVConnector, store: KVConnector, blocks: BlockManager, clock: Callable[[], float]
    ) -> None:
        self._handoff = handoff
        self._store = store
        self._blocks = blocks
        self._clock = clock
        self._next_job = 0
        self.jobs: dict[int, _Job] = {}  # of which results are due; while there are none, nothing has to be polled
        self._published: dict[str, list[int]] = {}  # request id: its publish jobs
        self._writing: dict[int, bytes] = {}  # block being written to the store: its name
        self._overdue: dict[_Key, TransferResult] = {}  # failed, but the transfer may still move bytes
        self._given_up: set[_Key] = set()  # blocks whose final results no request waits for
        self._num_requested = 0

    @property
    def num_in_flight(self) -> int:
        """Blocks whose final results are due, those being written to the store included."""
        return self._num_requested + len(self._writing)

    @property
    def may_write(self) -> bool:
        """Whether neither a request's transfer is under way nor another write, behind which a handoff would queue."""
        return not self.num_in_flight  # transfers that hang and were given up count: a write would hang, too

    def publish(self, request_id: str, blocks: Sequence[LocalBlock]) -> None:
        job_id = self._start(request_id, [block.block_id for block in blocks])
        self._published.setdefault(request_id, []).append(job_id)
        self._handoff.publish(job_id, blocks)

    def fetch(self, request_id: str, blocks: Sequence[FetchBlock]) -> None:
        if blocks:
            self._handoff.fetch(self._start(request_id, [block.block_id for block in blocks]), blocks)

    def fetch_stored(self, request_id: str, blocks: Sequence[FetchBlock]) -> None:
        if blocks:
            self._store.fetch(self._start(request_id, [block.block_id for block in blocks]), blocks)

    def write(self, blocks: Sequence[LocalBlock]) -> None:
        """Brings `blocks`, none of which is being written already, to the store."""
        self._writing.update((block.block_id, block.block_hash) for block in blocks)
        self._store.publish(self._start("", [block.block_id for block in blocks]), blocks)

    def is_writing(self, name: bytes) -> bool:
        """Whether a block of that name is on its way to the store."""
        return name in self._writing.values()

    def poll(self) -> Iterator[EndedTransfer | WrittenBlock]:
        """Results of transfers that ended, block by block. These blocks are not held any more."""
        now = self._clock()
        results = self._handoff.poll()
        if self._store is not self._handoff:
            results += self._store.poll()
        for result in results:
            job, key = self.jobs[result.job_id], _key(result)
            if not result.is_final:
                self._overdue[key] = result
                continue
            self._overdue.pop(key, None)
            job.num_due -= 1
            if job.num_due == 0:
                del self.jobs[result.job_id]
            self._blocks.unhold(result.block_id)
            if job.request_id:
                self._num_requested -= 1
                if key in self._given_up:
                    self._given_up.remove(key)
                else:
                    yield EndedTransfer(job.request_id, result, now - job.start)
            else:
                yield WrittenBlock(self._writing.pop(result.block_id), result.error, result.num_bytes)

    def overdue(self) -> dict[str, OverdueTransfers]:
        """The transfers, by request, that failed while bytes may still move, until they are given up or have ended."""
        found: dict[str, OverdueTransfers] = {}
        for result in self._overdue.values():
            job = self.jobs[result.job_id]
            if job.request_id:
                one = found.setdefault(job.request_id, OverdueTransfers())
                one.results.append(result)
                one.elapsed_s = max(one.elapsed_s, self._clock() - job.start)
        return found

    def give_up(self, result: TransferResult) -> None:
        """No request waits for the end of this overdue transfer any more. Its block is held until then."""
        del self._overdue[_key(result)]
        self._given_up.add(_key(result))

    def release(self, request_id: str) -> None:
        """The lease on everything that the request published has ended."""
        for job_id in self._published.pop(request_id, ()):
            self._handoff.release(job_id)

    def _start(self, request_id: str, block_ids: list[int]) -> int:
        self._next_job += 1
        self.jobs[self._next_job] = _Job(request_id, len(block_ids), self._clock())
        if request_id:
            self._num_requested += len(block_ids)
        self._blocks.hold(block_ids)
        return self._next_job
