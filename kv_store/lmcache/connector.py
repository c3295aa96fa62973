"""KV blocks through an LMCache server on this machine: host memory, and files or Redis behind it.

The engine's thread only groups and queues; a few threads talk to the server and copy, group by group.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from common.block_hash import HASH_BYTES
from common.errors import StartupError, TransferError
from common.types import KVCacheSpec
from kv_store.base import (
    BlockRef,
    ConnectorConfig,
    FetchBlock,
    KVConnector,
    LocalBlock,
    Lookup,
    TransferKind,
    TransferResult,
)
from kv_store.cache_view import CacheView
from kv_store.fair_queue import FairQueue
from kv_store.host_copy import HostCopy
from kv_store.jobs import Job
from kv_store.lmcache.client import LMCacheClient
from kv_store.lmcache.degrees import Degree, Degrees, Finder, LoadedGroup
from kv_store.lmcache.groups import Group, GroupLayout, split_into_groups
from kv_store.lmcache.settings import LMCacheSettings
from kv_store.lookups import Lookups
from kv_store.results import ResultQueue, block_result

if TYPE_CHECKING:
    from kv_store.base import KVCache

log = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0  # until a server that starts at the same time has to answer
LOOKUP_TIMEOUT_S = 0.25  # all the time that a lookup has, which is a hint
_PLACE_TIMEOUT_S = 1.5  # for another writer to finish, or for the server to evict, which it does once a second
_PLACE_POLL_S = 0.02
_JOIN_TIMEOUT_S = 2.0  # of close(), before calls under way are cut off


@dataclass(slots=True, frozen=True)
class _Part:
    """The work of one turn of a thread: the blocks of one group, or blocks to fetch whose groups are not known yet."""

    blocks: list[LocalBlock]
    group: Group | None
    degree: Degree | None = None  # whose group it is, if a hint says so


class LMCacheConnector(KVConnector):
    """A store: blocks are named by hash, outlive their producer, and need no peers.

    `lookup` assumes that the hashes are those of a request's blocks from the first one on, and finds less otherwise.
    Each block's reference carries a hint (`BlockRef.peer`) that finds it at once. Without the hint a block is found if
    the job also names the last block of its group, as a job for a whole prefix does.
    """

    name: ClassVar[str] = "lmcache"
    is_store: ClassVar[bool] = True

    def __init__(
        self,
        config: ConnectorConfig,
        *,
        start_timeout_s: float = START_TIMEOUT_S,
        lookup_timeout_s: float = LOOKUP_TIMEOUT_S,
    ) -> None:
        address = config.own(LMCacheSettings).lmcache_address
        if not address:
            raise StartupError("lmcache_address: host:port of an LMCache server on this machine is needed")
        self._config = config
        self._lookup_timeout_s = lookup_timeout_s
        self._client = LMCacheClient(address)
        self._queue: FairQueue[Job, _Part] = FairQueue()
        self._lookups = Lookups(self._look_up, "LMCache did not answer whether it holds KV blocks")
        self._threads: list[threading.Thread] = []
        try:
            self._client.wait_until_up(start_timeout_s)
        except StartupError:
            self._client.close(0.0)
            raise

    def register_kv_cache(self, cache: KVCache, spec: KVCacheSpec, wake: Callable[[], None]) -> None:
        self._view = CacheView(cache, spec)
        self._layout = GroupLayout(spec)
        kinds = [self._layout.chunk(Group(size, bytes(HASH_BYTES))) for size in self._layout.sizes]
        self._client.register(kinds, self._config.transfer_timeout_s)
        self._degrees = Degrees(self._client, spec)
        self._results = ResultQueue(wake)
        for number in range(self._config.num_io_threads):
            self._threads.append(threading.Thread(target=self._run, name=f"kv-lmcache-{number}", daemon=True))
        for thread in self._threads:
            thread.start()
        self._threads += self._lookups.run(wake)

    def describe(self) -> bytes:
        return b""

    def add_peer(self, peer: bytes) -> None:
        """Does nothing: the server is all that workers share."""

    def lookup(self, block_hashes: Sequence[bytes]) -> int:
        return self._look_up(block_hashes, time.monotonic() + self._lookup_timeout_s)[0]

    def start_lookup(self, block_hashes: Sequence[bytes]) -> Lookup:
        return self._lookups.start(block_hashes, self._lookup_timeout_s)

    def _look_up(self, block_hashes: Sequence[bytes], deadline: float) -> tuple[int, str | None]:
        """See `kv_store.lookups.LookUp`."""
        finder = Finder(self._degrees, dict(enumerate(block_hashes)), self._layout.sizes, deadline)
        num_found = 0
        try:
            while num_found < len(block_hashes) and (found := finder.find(num_found)) is not None:
                num_found = found[2].stop
        except TransferError as error:
            return num_found, error.message
        return num_found, None

    def publish(self, job_id: int, blocks: Sequence[LocalBlock]) -> None:
        groups = split_into_groups(blocks, self._layout.sizes)
        parts = [_Part(group, Group(len(group), group[-1].block_hash)) for group in groups]
        self._start(job_id, TransferKind.PUBLISH, parts)

    def fetch(self, job_id: int, blocks: Sequence[FetchBlock]) -> None:
        by_group: dict[tuple[Group | None, Degree | None], list[LocalBlock]] = {}
        for block in blocks:
            group, tp_size = Group.from_hint(block.ref.peer) or (None, 0)
            degree = self._degrees.of_size(tp_size)
            if degree is None or group is None or group.num_blocks not in self._layout.sizes:
                group = degree = None
            local = LocalBlock(block.ref.index, block.block_id, block.ref.block_hash)
            by_group.setdefault((group, degree), []).append(local)
        parts = [_Part(members, group, degree) for (group, degree), members in by_group.items()]
        self._start(job_id, TransferKind.FETCH, parts)

    def poll(self) -> list[TransferResult]:
        return self._results.drain()

    def release(self, job_id: int) -> None:
        """Does nothing: the server keeps what is used."""

    def close(self) -> None:
        """Waits for the copy under way, since the cache may go after it; a call to the server is cut off."""
        self._queue.close()
        self._lookups.close()
        for thread in self._threads:
            thread.join(_JOIN_TIMEOUT_S)
        self._client.close(_JOIN_TIMEOUT_S)
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def _start(self, job_id: int, kind: TransferKind, parts: list[_Part]) -> None:
        if parts:
            deadline = time.monotonic() + self._config.transfer_timeout_s
            self._queue.put(Job(job_id, kind, deadline, self._view.mark()), parts)

    # ------------------------------------------------------------------------------------- I/O threads

    def _run(self) -> None:
        copy: HostCopy | None = None
        while (taken := self._queue.take(1)) is not None:
            job, (part,) = taken
            due = {(block.index, block.block_id): block for block in part.blocks}

            def settle(results: Iterable[TransferResult], due: dict[tuple[int, int], LocalBlock] = due) -> None:
                """Reports results; each block has one, whatever happens after it."""
                settled = list(results)
                for result in settled:
                    del due[result.index, result.block_id]
                self._results.add(settled)

            try:
                copy = copy or HostCopy(self._view, self._layout.sizes[-1])
                if job.kind is TransferKind.FETCH:
                    self._fetch(job, part, copy, settle)
                elif part.group is not None:
                    settle(self._publish(job, part.blocks, part.group, copy))
            except TransferError as error:
                settle(_failed(job, due.values(), error.message))
            except Exception as error:
                # Not a block's fault: the device, or a defect. Each block still gets its one result.
                log.exception("KV transfer failed", extra={"job_id": job.job_id})
                settle(_failed(job, due.values(), f"{type(error).__name__}: {error}"))

    def _publish(self, job: Job, blocks: list[LocalBlock], group: Group, copy: HostCopy) -> list[TransferResult]:
        _check_deadline(job)
        self._degrees.leave_mark(job.deadline)
        hashes = [block.block_hash for block in blocks]
        data = copy.load([block.block_id for block in blocks], job.after)
        give_up = min(job.deadline, time.monotonic() + _PLACE_TIMEOUT_S)
        while (num_bytes := self._store(job, group, hashes, data)) is None:
            if time.monotonic() > give_up:
                raise TransferError("LMCache has no room, or waits for another writer of the same blocks")
            time.sleep(_PLACE_POLL_S)
        return [
            block_result(
                job,
                block,
                ref=BlockRef(index=block.index, block_hash=block.block_hash, peer=group.hint(self._layout.tp_size)),
                num_bytes=num_bytes,
            )
            for block in blocks
        ]

    def _store(self, job: Job, group: Group, hashes: list[bytes], data: list[memoryview]) -> int | None:
        """Bytes moved per block: 0 if the group was there; None if it was not and cannot be written now."""
        chunk = self._layout.chunk(group)
        if self._client.store(chunk, lambda slot: self._layout.write(slot, hashes, data), job.deadline):
            return self._view.block_bytes
        with self._client.loaded(chunk, job.deadline) as slot:
            if slot is None:
                return None
            if self._layout.holds(slot, hashes):
                return 0
            # Lost half-written, or changed since. Readers see that it is wrong, or, when this is done, right.
            log.warning("repairing a corrupt group in LMCache", extra={"last_hash": group.last_hash.hex()})
            self._layout.write(slot, hashes, data)
            return self._view.block_bytes

    def _fetch(self, job: Job, part: _Part, copy: HostCopy, settle: Callable[[Iterable[TransferResult]], None]) -> None:
        if part.group is not None:
            for degree in self._degrees.to_ask(part.degree, job.deadline):
                if self._fetch_group(job, part.blocks, degree, part.group, copy, settle):
                    return
            settle([_not_stored(job, block) for block in part.blocks])
            return
        hashes = {block.index: block.block_hash for block in part.blocks}
        finder = Finder(self._degrees, hashes, self._layout.sizes, job.deadline)
        left = sorted(part.blocks, key=lambda block: block.index)
        while left:
            _check_deadline(job)
            found = finder.find(left[0].index)
            if found is None:
                settle([_not_stored(job, left.pop(0))])
                continue
            degree, group, indexes = found
            members = [block for block in left if block.index in indexes]
            left = [block for block in left if block.index not in indexes]
            if not self._fetch_group(job, members, degree, group, copy, settle):
                settle([_not_stored(job, block) for block in members])

    def _fetch_group(
        self,
        job: Job,
        blocks: list[LocalBlock],
        degree: Degree,
        group: Group,
        copy: HostCopy,
        settle: Callable[[Iterable[TransferResult]], None],
    ) -> bool:
        """Returns False and settles nothing if that degree does not have the group."""
        _check_deadline(job)
        with degree.loaded(group, job.deadline) as loaded:
            if loaded is None:
                return False
            # A job may want one block twice, and more blocks than the group has: then most of them are not in it.
            for start in range(0, len(blocks), group.num_blocks):
                settle(self._read(job, blocks[start : start + group.num_blocks], loaded, copy))
            return True

    def _read(self, job: Job, blocks: list[LocalBlock], loaded: LoadedGroup, copy: HostCopy) -> list[TransferResult]:
        block_ids = [block.block_id for block in blocks]
        results: list[TransferResult] = []
        for block, buffer in zip(blocks, copy.buffers(block_ids), strict=True):
            error = loaded.read(block.block_hash, buffer)
            results.append(block_result(job, block, error=error, num_bytes=0 if error else self._view.block_bytes))
        copy.store(block_ids, [result.error is None for result in results], job.after)
        return results


def _check_deadline(job: Job) -> None:
    if time.monotonic() > job.deadline:
        raise TransferError("LMCache: not done in time")


def _not_stored(job: Job, block: LocalBlock) -> TransferResult:
    return block_result(job, block, error=f"block {block.block_hash.hex()} is not in LMCache")


def _failed(job: Job, blocks: Iterable[LocalBlock], error: str) -> list[TransferResult]:
    return [block_result(job, block, error=error) for block in blocks]
