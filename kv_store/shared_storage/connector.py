"""KV blocks through a directory that all workers share: a local disk, tmpfs, or any POSIX file system.

The engine's thread only queues; a few threads do the I/O, in slices of several blocks, and report slice by slice. A
slice that is published is one run file. Lookups have a thread of their own.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from common import metrics
from common.errors import StartupError, TransferError
from common.types import KVCacheSpec
from kv_store.background_work import BackgroundWork
from kv_store.base import (
    BlockRef,
    ConnectorConfig,
    Eviction,
    FetchBlock,
    KVConnector,
    LocalBlock,
    Lookup,
    TransferKind,
    TransferResult,
)
from kv_store.cache_view import CacheView
from kv_store.failures import Failures
from kv_store.fair_queue import FairQueue
from kv_store.host_copy import HostCopy
from kv_store.jobs import Job
from kv_store.lookups import Lookups
from kv_store.overdue import OverdueWatch
from kv_store.results import ResultQueue, block_result
from kv_store.shared_storage.block_files import BlockData, FullDiskError, prepare_directory
from kv_store.shared_storage.file_clock import FileClock
from kv_store.shared_storage.layout import writer_id
from kv_store.shared_storage.run_file import HEADER_BYTES, MAX_BLOCKS, RUN_BYTES
from kv_store.shared_storage.settings import SharedStorageSettings
from kv_store.shared_storage.sharded_files import ShardedFiles
from kv_store.shared_storage.space import StoreSpace

if TYPE_CHECKING:
    from kv_store.base import KVCache

log = logging.getLogger(__name__)

LOOKUP_TIMEOUT_S = 0.5  # of a lookup, which is only a hint; if it hangs, it is answered after twice that
_ROOM_CHECK_S = 0.5  # while writes wait for room below the size limit
_JOIN_TIMEOUT_S = 5.0  # of close(): a thread that hangs in a dead network file system is left behind


@dataclass(slots=True, frozen=True, eq=False)
class _Slice:
    """Blocks of a job that a thread has taken."""

    job: Job
    blocks: list[LocalBlock]


class SharedStorageConnector(KVConnector):
    """A store: blocks are named by hash, outlive their producer, and need no peers.

    A read or write that has begun cannot be stopped. If it is not done within `transfer_timeout_s` it fails all the
    same, but its blocks stay this connector's until the call returns, however long the file system takes. While all
    threads hang, what is queued fails at once. With a size limit, writes wait for room; reads pass them by.
    """

    name: ClassVar[str] = "shared_storage"
    is_store: ClassVar[bool] = True

    def __init__(
        self,
        config: ConnectorConfig,
        *,
        lookup_timeout_s: float = LOOKUP_TIMEOUT_S,
        join_timeout_s: float = _JOIN_TIMEOUT_S,
    ) -> None:
        self._config = config
        self._lookup_timeout_s, self._join_timeout_s = lookup_timeout_s, join_timeout_s
        own = config.own(SharedStorageSettings)
        self._kv_dir = prepare_directory(own.kv_dir or "")
        self._limit_bytes = None if own.kv_dir_size_gb is None else int(own.kv_dir_size_gb * 2**30)
        try:
            self._clock = FileClock(self._kv_dir, writer_id())
        except OSError as error:
            raise StartupError(f"kv_dir: cannot use {own.kv_dir!r}: {error.strerror or error}") from error
        self._queue: FairQueue[Job, LocalBlock] = FairQueue()
        self._lookups = Lookups(self._look_up, "kv_dir did not answer whether it holds KV blocks")
        self._threads: list[threading.Thread] = []
        self._space: StoreSpace | None = None
        self._failures = Failures("KV blocks could not be stored", "num_blocks")
        self._given_up = Failures("kv_dir did not answer in time: KV blocks were given up", "num_blocks")
        self._watch: OverdueWatch[_Slice] = OverdueWatch(
            config.num_io_threads, config.transfer_timeout_s, self._give_up, self._give_up_queued
        )

    def register_kv_cache(self, cache: KVCache, spec: KVCacheSpec, wake: Callable[[], None]) -> None:
        self._view = CacheView(cache, spec)
        self._files = ShardedFiles(self._kv_dir, spec, self._clock)
        self._results = ResultQueue(wake)
        self._background = BackgroundWork(wake)
        self._slice_blocks = min(max(1, RUN_BYTES // spec.block_bytes), MAX_BLOCKS)
        if self._limit_bytes is not None:
            self._space = StoreSpace(self._kv_dir, self._clock, self._limit_bytes, self._queue.recheck)
            self._space.start()
        for number in range(self._config.num_io_threads):
            thread = threading.Thread(target=self._run, name=f"kv-io-{number}", args=(number == 0,), daemon=True)
            thread.start()
            self._threads.append(thread)
        self._threads += [*self._lookups.run(wake), self._watch.start(), self._background.start()]

    def describe(self) -> bytes:
        return b""

    def add_peer(self, peer: bytes) -> None:
        """Does nothing: the directory is all that workers share."""

    def lookup(self, block_hashes: Sequence[bytes]) -> int:
        return self._look_up(block_hashes, math.inf)[0]

    def start_lookup(self, block_hashes: Sequence[bytes]) -> Lookup:
        return self._lookups.start(block_hashes, self._lookup_timeout_s)

    def _look_up(self, block_hashes: Sequence[bytes], deadline: float) -> tuple[int, str | None]:
        """See `kv_store.lookups.LookUp`."""
        for num_found, block_hash in enumerate(block_hashes):
            if time.monotonic() > deadline:
                return num_found, f"looked at {num_found} of {len(block_hashes)} blocks in time"
            if not self._files.contains(block_hash):
                return num_found, None
        return len(block_hashes), None

    def touch(self, block_hashes: Sequence[bytes]) -> None:
        self._background.add(lambda: self._files.own.touch(block_hashes))

    def evict(self, block_hashes: Sequence[bytes]) -> Eviction:
        eviction = Eviction()

        def forget() -> None:
            num_blocks = 0
            try:
                num_blocks = self._files.forget(block_hashes)
            except OSError as error:
                eviction.failure = f"kv_dir: {error.strerror or error}"
            finally:
                eviction.num_blocks = num_blocks

        return eviction if self._background.add(forget) else Eviction(0, "kv_dir hangs")

    def publish(self, job_id: int, blocks: Sequence[LocalBlock]) -> None:
        self._start(Job(job_id, TransferKind.PUBLISH, math.inf, self._view.mark()), blocks)

    def fetch(self, job_id: int, blocks: Sequence[FetchBlock]) -> None:
        deadline = time.monotonic() + self._config.transfer_timeout_s
        self._start(
            Job(job_id, TransferKind.FETCH, deadline, self._view.mark()),
            [LocalBlock(block.ref.index, block.block_id, block.ref.block_hash) for block in blocks],
        )

    def poll(self) -> list[TransferResult]:
        return self._results.drain()

    def release(self, job_id: int) -> None:
        """Does nothing: the files are the lease."""

    def close(self) -> None:
        if not self._threads:  # it was never given a cache
            return
        self._queue.close()
        self._lookups.close()
        self._background.close()
        self._watch.close()
        if self._space is not None and not self._space.close(self._join_timeout_s):
            log.warning("the cleaner still waits for the file system")
        for thread in self._threads:
            thread.join(self._join_timeout_s)
            if thread.is_alive():
                log.warning("I/O thread still waits for the file system", extra={"io_thread": thread.name})
        self._threads.clear()

    def _start(self, job: Job, blocks: Sequence[LocalBlock]) -> None:
        self._queue.put(job, blocks)
        if self._watch.is_stuck:
            self._give_up_queued()

    # ------------------------------------------------------------------------------------- what hangs

    def _give_up(self, late: _Slice) -> None:
        error = f"kv_dir hangs: not done within {self._config.transfer_timeout_s} s"
        self._fail(late.job, late.blocks, error, is_final=False)

    def _give_up_queued(self) -> None:
        for job, blocks in self._queue.drop_all():
            self._fail(job, blocks, "kv_dir hangs", is_final=True)

    def _fail(self, job: Job, blocks: list[LocalBlock], error: str, *, is_final: bool) -> None:
        metrics.kv_store_failed_blocks.labels("write" if job.kind is TransferKind.PUBLISH else "read").inc(len(blocks))
        self._given_up.add(len(blocks), error)
        self._results.add(block_result(job, block, error=error, is_final=is_final) for block in blocks)

    # ------------------------------------------------------------------------------------- I/O threads

    def _run(self, is_cleaner: bool) -> None:
        if is_cleaner:
            work = _Slice(Job(0, TransferKind.PUBLISH, math.inf, None), [])
            self._watch.begin(work, math.inf)
            self._clean_up()
            self._watch.end(work)
        copy: HostCopy | None = None
        while (taken := self._take()) is not None:
            job, blocks = taken
            if job.kind is TransferKind.FETCH and time.monotonic() > job.deadline:  # it is not begun any more
                error = f"not read within {self._config.transfer_timeout_s} s"
                self._results.add(block_result(job, block, error=error) for block in blocks)
                continue
            work = _Slice(job, blocks)
            self._watch.begin(work, min(job.deadline, time.monotonic() + self._config.transfer_timeout_s))
            try:
                copy = copy or HostCopy(self._view, self._slice_blocks)
                if job.kind is TransferKind.PUBLISH:
                    results = self._write(job, blocks, copy)
                else:
                    results = self._read(job, blocks, copy)
            except Exception as error:
                # Not a block's fault: the device, or a defect. Each block still gets its final result.
                log.exception("KV transfer failed", extra={"job_id": job.job_id})
                results = [block_result(job, block, error=f"{type(error).__name__}: {error}") for block in blocks]
            self._watch.end(work)
            self._results.add(results)

    def _take(self) -> tuple[Job, list[LocalBlock]] | None:
        """The next slice; None once closed."""
        timeout_s = _ROOM_CHECK_S if self._space is not None else None
        while not self._queue.is_closed:
            if taken := self._queue.take(self._slice_blocks, timeout_s, self._may_begin):
                return taken
        return None

    def _may_begin(self, job: Job) -> bool:
        return job.kind is TransferKind.FETCH or self._space is None or self._space.has_room()

    def _write(self, job: Job, blocks: list[LocalBlock], copy: HostCopy) -> list[TransferResult]:
        outcomes: list[int | TransferError]
        if self._files.own.are_used(block.block_hash for block in blocks):  # nothing has to be copied, nor room made
            outcomes = [0] * len(blocks)
        else:
            data = copy.load([block.block_id for block in blocks], job.after)
            outcomes = self._write_within_limit(
                [BlockData(block.block_hash, block.index, memory) for block, memory in zip(blocks, data, strict=True)]
            )
        results: list[TransferResult] = []
        for block, outcome in zip(blocks, outcomes, strict=True):
            if isinstance(outcome, TransferError):
                results.append(block_result(job, block, error=outcome.message))
            else:
                ref = BlockRef(index=block.index, block_hash=block.block_hash)
                results.append(block_result(job, block, ref=ref, num_bytes=outcome))
        return results

    def _write_within_limit(self, blocks: list[BlockData]) -> list[int | TransferError]:
        if self._space is None:
            outcomes = self._files.own.write(blocks)
        else:
            num_bytes = HEADER_BYTES + len(blocks) * self._view.block_bytes
            self._space.begin(num_bytes)
            outcomes = []
            try:
                outcomes = self._files.own.write(blocks)
            finally:
                num_new = sum(outcome for outcome in outcomes if isinstance(outcome, int))
                self._space.end(
                    num_bytes,
                    num_new + HEADER_BYTES if num_new else 0,
                    disk_is_full=any(isinstance(outcome, FullDiskError) for outcome in outcomes),
                    has_links=self._files.own.has_links,
                )
        failed = [outcome for outcome in outcomes if isinstance(outcome, TransferError)]
        if failed:
            metrics.kv_store_failed_blocks.labels("write").inc(len(failed))
            self._failures.add(len(failed), failed[0].message)
        return outcomes

    def _read(self, job: Job, blocks: list[LocalBlock], copy: HostCopy) -> list[TransferResult]:
        block_ids = [block.block_id for block in blocks]
        buffers = copy.buffers(block_ids)
        outcomes = self._files.read([(block.block_hash, buffer) for block, buffer in zip(blocks, buffers, strict=True)])
        metrics.kv_store_failed_blocks.labels("read").inc(sum(error is not None for error in outcomes))
        copy.store(block_ids, [error is None for error in outcomes], job.after)
        return [
            block_result(job, block, num_bytes=self._view.block_bytes)
            if error is None
            else block_result(job, block, error=error.message)
            for block, error in zip(blocks, outcomes, strict=True)
        ]

    def _clean_up(self) -> None:
        try:
            num_deleted = self._files.own.delete_stale_temps()
        except OSError as error:
            log.warning("cannot clean up temporary files", extra={"kv_dir": str(self._kv_dir), "reason": str(error)})
        else:
            if num_deleted:
                log.info("deleted what killed writers left", extra={"num_files": num_deleted})
