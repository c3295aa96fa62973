"""The producing side of the NIXL connector: makes blocks readable, and reports them.

Peers read the cache itself, so a CPU has nothing to do; a device waits until the work queued before is done. Checksums
are computed if they are asked for. If peers cannot reach the cache, each block is copied into a pool of host memory
first. If the pool is full, jobs wait in turns. A block that waits for longer than `transfer_timeout_s` fails, and the
consumer computes it. So two jobs that wait for each other lose time, but do not block each other for ever.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

import msgspec
import numpy as np

from common.errors import TransferError
from common.types import KVCacheSpec
from kv_store.base import BlockRef, LocalBlock, TransferKind, TransferResult
from kv_store.cache_view import CacheView
from kv_store.checksums import head_checksums
from kv_store.fair_queue import FairQueue
from kv_store.host_copy import HostCopy
from kv_store.jobs import Job
from kv_store.nixl.agent import ServingAgent
from kv_store.nixl.slots import ServedSlots
from kv_store.results import ResultQueue, block_result
from kv_store.shards import num_readers

log = logging.getLogger(__name__)

_REPORT_INTERVAL_S = 1e-3  # between two looks for reports, while blocks may wait for a slot
_JOIN_TIMEOUT_S = 5.0


class ReadReport(msgspec.Struct, frozen=True, array_like=True):
    """What a consumer sends with a read of staged blocks, as msgpack; it comes when the read is done."""

    tp_size: int  # of the consumer
    tp_rank: int
    tickets: list[int]


def decode_report(message: bytes, spec: KVCacheSpec) -> ReadReport:
    """Raises `TransferError` if this is no report of a worker that shares heads with us. `spec` is ours."""
    try:
        report = msgspec.msgpack.decode(message, type=ReadReport)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TransferError(str(error)) from error
    num_heads = spec.num_kv_heads_in_all
    if not 1 <= report.tp_size <= num_heads or num_heads % report.tp_size:
        raise TransferError(f"{num_heads} heads cannot be dealt out among {report.tp_size} ranks")
    if not 0 <= report.tp_rank < report.tp_size:
        raise TransferError(f"{report.tp_rank} is not a rank of {report.tp_size}")
    return report


class Publisher:
    """One thread, which reports to `results`. `pool` is None if peers read the cache itself."""

    def __init__(
        self,
        *,
        spec: KVCacheSpec,
        view: CacheView,
        serving: ServingAgent,
        results: ResultQueue,
        peer_name: str,
        epoch: str,
        pool: HostCopy | None,
        slice_blocks: int,
        has_checksums: bool,
        timeout_s: float,
    ) -> None:
        self._spec = spec
        self._view = view
        self._serving = serving
        self._results = results
        self._peer_name = peer_name
        self._epoch = epoch
        self._pool = pool
        self._slots = ServedSlots(pool.num_slots) if pool is not None else None
        self._slice_blocks = slice_blocks
        self._has_checksums = has_checksums
        self._timeout_s = timeout_s
        self._copy: HostCopy | None = None  # of the thread, for checksums
        self._leased: set[int] = set()  # jobs with staged blocks whose lease lasts
        self._queue: FairQueue[Job, LocalBlock] = FairQueue()
        self._thread = threading.Thread(target=self._run, name="kv-nixl-publish", daemon=True)
        self._thread.start()

    def publish(self, job_id: int, blocks: Sequence[LocalBlock]) -> None:
        job = Job(job_id, TransferKind.PUBLISH, time.monotonic() + self._timeout_s, self._view.mark())
        if self._pool is not None:
            self._leased.add(job_id)
        elif job.after is None and not self._has_checksums:
            self._results.add(self._published(job, block) for block in blocks)
            return
        self._queue.put(job, blocks)

    def release(self, job_id: int) -> None:
        if self._slots is not None:
            self._leased.discard(job_id)  # first, so that the thread takes no slot for it after this
            self._slots.release(job_id)

    def close(self) -> None:
        self._queue.close()
        self._thread.join(_JOIN_TIMEOUT_S)
        if self._thread.is_alive():
            log.warning("NIXL thread does not end", extra={"nixl_thread": self._thread.name})

    # ---------------------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        while not self._queue.is_closed:
            if self._slots is not None:
                self._take_in_reports(self._slots)
            num_free = self._slice_blocks if self._slots is None else self._slots.num_free
            taken = self._queue.take(
                min(num_free, self._slice_blocks) or self._slice_blocks,
                timeout_s=None if num_free else _REPORT_INTERVAL_S,
                accepts=lambda job, is_room=num_free > 0: is_room or self._refusal(job) is not None,  # type: ignore[misc]
            )
            if taken is not None:
                self._results.add(self._made_readable(*taken))

    def _made_readable(self, job: Job, blocks: list[LocalBlock]) -> list[TransferResult]:
        try:
            if self._pool is None or self._slots is None:
                return self._in_place(job, blocks)
            if error := self._refusal(job):
                log.warning("KV blocks were not staged", extra={"job_id": job.job_id, "reason": error})
                return [block_result(job, block, error=error) for block in blocks]
            return self._staged(job, blocks, self._pool, self._slots)
        except Exception as error:
            log.exception("publishing KV blocks failed", extra={"job_id": job.job_id})
            return [block_result(job, block, error=f"{type(error).__name__}: {error}") for block in blocks]

    def _in_place(self, job: Job, blocks: list[LocalBlock]) -> list[TransferResult]:
        checksums: list[tuple[int, ...]] = [()] * len(blocks)
        if self._has_checksums:
            self._copy = self._copy or HostCopy(self._view, self._slice_blocks)
            loaded = self._copy.load([block.block_id for block in blocks], job.after)
            checksums = [head_checksums(np.frombuffer(data, dtype=np.uint8), self._spec) for data in loaded]
        elif job.after is not None:
            job.after.synchronize()  # peers read past all streams
        return [self._published(job, block, checksums=sums) for block, sums in zip(blocks, checksums, strict=True)]

    def _staged(self, job: Job, blocks: list[LocalBlock], pool: HostCopy, slots: ServedSlots) -> list[TransferResult]:
        tickets = slots.take(job.job_id, len(blocks))
        positions = [ticket % pool.num_slots for ticket in tickets]
        pool.load([block.block_id for block in blocks], job.after, positions)
        if job.job_id not in self._leased:  # released meanwhile, maybe before it took the slots
            slots.release(job.job_id)
        return [
            self._published(job, block, head_checksums(pool.memory[position], self._spec), (ticket,))
            for block, position, ticket in zip(blocks, positions, tickets, strict=True)
        ]

    def _take_in_reports(self, slots: ServedSlots) -> None:
        for message in self._serving.notifications():
            try:
                report = decode_report(message, self._spec)
            except TransferError as error:
                log.warning("a peer reports nonsense", extra={"reason": error.message})
                continue
            for ticket in report.tickets:
                slots.report(ticket, report.tp_rank, num_readers(self._spec, report.tp_size))

    def _published(
        self, job: Job, block: LocalBlock, checksums: tuple[int, ...] = (), staged_slots: tuple[int, ...] = ()
    ) -> TransferResult:
        ref = BlockRef(
            index=block.index,
            block_hash=block.block_hash,
            peer=self._peer_name,
            epoch=self._epoch,
            block_id=block.block_id,
            checksums=checksums,
            staged_slots=staged_slots,
        )
        return block_result(job, block, ref=ref)

    def _refusal(self, job: Job) -> str | None:
        """Why a block that waits for a slot will get none; None while it may get one."""
        if job.job_id not in self._leased:
            return "the lease ended before the block was staged"
        if time.monotonic() >= job.deadline:
            return f"no room to stage the block for {self._timeout_s} s"
        return None
