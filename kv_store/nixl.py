"""KV blocks from worker to worker over NIXL: RDMA, CUDA IPC, shared memory or TCP, whatever UCX finds between them.

The consumer reads, the producer's process does nothing. One thread posts the reads, in slices of several blocks, the
jobs in turns, and watches them. A read that fails, or that is not done by its deadline, costs the whole reading agent
(see `kv_store.nixl_agent` for why): new reads get another one, the good ones on the old finish, then it ends, and only
then is the failure reported. So every result means what it says.

Known limit, over TCP only: a producer that was stopped (SIGSTOP, a frozen machine) in mid-transfer, and whose consumer
has gone or given up meanwhile, is aborted by UCX when it goes on. A worker that comes back so has to be restarted.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import msgspec
import torch
import xxhash

from common.errors import StartupError, TransferError
from common.types import KVCacheSpec
from kv_store.base import (
    BlockRef,
    ConnectorConfig,
    FetchBlock,
    KVConnector,
    LocalBlock,
    TransferKind,
    TransferResult,
)
from kv_store.cache_view import CacheView, Staging
from kv_store.fair_queue import FairQueue
from kv_store.nixl_agent import Read, ReadingAgent, ServedMemory, ServingAgent, load_library
from kv_store.peers import PeerInfo, check_compatible, decode_peer, encode_peer
from kv_store.results import ResultQueue

log = logging.getLogger(__name__)

SLICE_BYTES = 8 << 20  # of one read: one turn of a job
_MAX_READS_PER_PEER = 4  # in flight: enough to keep a link busy, and a peer that hangs holds up no other
_MIN_PAUSE_S, _MAX_PAUSE_S = 50e-6, 1e-3  # between two looks at reads in flight
_JOIN_TIMEOUT_S = 5.0


@dataclass(slots=True, eq=False)
class _Peer:
    info: PeerInfo
    memory: ServedMemory
    is_lost: bool = False  # a read failed; until the peer is added again, so do all others, at once
    num_reads: int = 0  # in flight


@dataclass(slots=True, eq=False)
class _FetchJob:
    job_id: int
    peer: _Peer
    deadline: float  # time.monotonic()
    after: torch.cuda.Event | None  # device work that comes before it


@dataclass(slots=True, eq=False)
class _PublishJob:
    job_id: int
    after: torch.cuda.Event | None


@dataclass(slots=True, eq=False)
class _Flight:
    """A slice that was taken from the queue and whose results are due."""

    job: _FetchJob
    blocks: list[FetchBlock]
    agent: ReadingAgent | None = None
    read: Read | None = None


class NixlConnector(KVConnector):
    """P2P. Memory of any device that UCX reaches; both ends register their whole cache once."""

    name: ClassVar[str] = "nixl"
    is_store: ClassVar[bool] = False

    def __init__(self, config: ConnectorConfig) -> None:
        self._config = config
        self._library = load_library()
        self._peer_name = config.worker_id or f"nixl-{uuid.uuid4().hex}"
        self._epoch = config.epoch or uuid.uuid4().hex
        try:
            self._serving = ServingAgent(self._library, f"{self._peer_name}-{self._epoch}-serve")
        except StartupError:
            raise
        except Exception as error:
            raise StartupError(f"connector: NIXL cannot start: {type(error).__name__}: {error}") from error
        self._peers: dict[str, _Peer] = {}  # by name, current epoch only
        self._fetches: FairQueue[_FetchJob, FetchBlock] = FairQueue()
        self._publishes: FairQueue[_PublishJob, LocalBlock] = FairQueue()
        self._threads: list[threading.Thread] = []
        # The fetch thread's own:
        self._reading: ReadingAgent | None = None
        self._flights: list[_Flight] = []
        self._doomed: dict[ReadingAgent, list[tuple[_Flight, str]]] = {}  # agents with a failed read, and those reads
        self._fetch_staging: Staging | None = None

    def register_kv_cache(self, cache: torch.Tensor, spec: KVCacheSpec, wake: Callable[[], None]) -> None:
        self._spec = spec
        self._view = CacheView(cache, spec)
        self._results = ResultQueue(wake)
        self._slice_blocks = max(1, SLICE_BYTES // spec.block_bytes)
        self._memory = self._serving.register(self._view)
        for target in (self._run_fetches, self._run_publishes):
            thread = threading.Thread(target=target, name=f"kv-nixl-{target.__name__[5:]}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def describe(self) -> bytes:
        info = PeerInfo(
            connector=self.name,
            name=self._peer_name,
            epoch=self._epoch,
            spec=self._spec,
            num_blocks=self._view.num_blocks,
            transport=msgspec.msgpack.encode(self._memory),
        )
        return encode_peer(info)

    def add_peer(self, peer: bytes) -> None:
        """Begins to connect. Adding a peer again after a failed read has it tried again."""
        info = decode_peer(peer)
        check_compatible(self.name, self._spec, info)
        try:
            memory = msgspec.msgpack.decode(info.transport, type=ServedMemory)
        except msgspec.DecodeError as error:
            raise TransferError(f"peer {info.name!r}: no description of its memory: {error}") from error
        known = self._peers.get(info.name)
        if known is None or known.is_lost or known.memory.agent != memory.agent:
            self._peers[info.name] = added = _Peer(info, memory)
            # No blocks: connecting takes longer than a read, so it is begun before the first block is announced.
            self._fetches.put_turn(_FetchJob(0, added, 0.0, None))

    def lookup(self, block_hashes: Sequence[bytes]) -> int:  # noqa: ARG002
        return 0

    def publish(self, job_id: int, blocks: Sequence[LocalBlock]) -> None:
        after = self._view.mark()
        if after is None and not self._config.verify_checksums:
            self._results.add(self._published(job_id, block) for block in blocks)
        else:
            self._publishes.put(_PublishJob(job_id, after), blocks)

    def fetch(self, job_id: int, blocks: Sequence[FetchBlock]) -> None:
        deadline = time.monotonic() + self._config.transfer_timeout_s
        after = self._view.mark()
        by_peer: dict[_Peer, list[FetchBlock]] = {}
        for block in blocks:
            peer = self._peers.get(block.ref.peer)
            error = _refusal(block.ref, peer)
            if peer is None or error is not None:
                self._results.add([_fetched(job_id, block, error=error)])
            else:
                by_peer.setdefault(peer, []).append(block)
        for peer, peer_blocks in by_peer.items():
            self._fetches.put(_FetchJob(job_id, peer, deadline, after), peer_blocks)

    def poll(self) -> list[TransferResult]:
        return self._results.drain()

    def release(self, job_id: int) -> None:
        """Does nothing: this side takes no part in reads. Peers read only what a stream announced, while it lasts."""

    def close(self) -> None:
        self._fetches.close()
        self._publishes.close()
        for thread in self._threads:
            thread.join(_JOIN_TIMEOUT_S)
            if thread.is_alive():
                log.warning("NIXL thread does not end", extra={"thread": thread.name})
        self._threads.clear()
        self._serving.close()

    # ---------------------------------------------------------------------------------- publish thread

    def _run_publishes(self) -> None:
        staging: Staging | None = None
        while (taken := self._publishes.take(self._slice_blocks)) is not None:
            job, blocks = taken
            try:
                checksums: list[int | None] = [None] * len(blocks)
                if self._config.verify_checksums:
                    staging = staging or Staging(self._view, self._slice_blocks)
                    loaded = staging.load([block.block_id for block in blocks], job.after)
                    checksums = [xxhash.xxh3_64_intdigest(data) for data in loaded]
                elif job.after is not None:
                    job.after.synchronize()  # peers read past all streams
                results = [
                    self._published(job.job_id, block, checksum)
                    for block, checksum in zip(blocks, checksums, strict=True)
                ]
            except Exception as error:
                log.exception("publishing KV blocks failed", extra={"job_id": job.job_id})
                results = [
                    TransferResult(
                        job_id=job.job_id,
                        kind=TransferKind.PUBLISH,
                        index=block.index,
                        block_id=block.block_id,
                        error=f"{type(error).__name__}: {error}",
                    )
                    for block in blocks
                ]
            self._results.add(results)

    def _published(self, job_id: int, block: LocalBlock, checksum: int | None = None) -> TransferResult:
        ref = BlockRef(
            index=block.index,
            block_hash=block.block_hash,
            peer=self._peer_name,
            epoch=self._epoch,
            block_id=block.block_id,
            checksum=checksum,
        )
        return TransferResult(
            job_id=job_id, kind=TransferKind.PUBLISH, index=block.index, block_id=block.block_id, ref=ref
        )

    # ------------------------------------------------------------------------------------ fetch thread

    def _run_fetches(self) -> None:
        if not self._view.is_on_host:
            torch.cuda.set_device(self._view.device)
        pause_s = _MIN_PAUSE_S
        while not self._fetches.is_closed:
            try:
                taken = self._fetches.take(
                    self._slice_blocks,
                    timeout_s=pause_s if self._flights or self._doomed else None,
                    accepts=lambda job: job.peer.num_reads < _MAX_READS_PER_PEER,
                )
                if taken is not None:
                    self._begin(*taken)
                is_busy = self._check_flights() or taken is not None
                self._end_doomed_agents()
                pause_s = _MIN_PAUSE_S if is_busy else min(2 * pause_s, _MAX_PAUSE_S)
            except Exception as error:
                # A defect. The blocks under way get their results all the same, and the thread lives on.
                log.exception("fetching KV blocks failed")
                for flight in list(self._flights):
                    self._fail(flight, f"{type(error).__name__}: {error}")
        for agent in {self._reading, *self._doomed, *(flight.agent for flight in self._flights)}:
            if agent is not None:
                agent.close()

    def _begin(self, job: _FetchJob, blocks: list[FetchBlock]) -> None:
        if not blocks:
            self._connect_ahead(job.peer)
            return
        flight = _Flight(job, blocks)
        self._flights.append(flight)
        job.peer.num_reads += 1
        error = _refusal(blocks[0].ref, self._peers.get(job.peer.info.name))
        if error is None and time.monotonic() >= job.deadline:
            error = f"not begun within {self._config.transfer_timeout_s} s"
        if error is not None:
            self._report(flight, error)
            return
        if job.after is not None:
            job.after.synchronize()  # reads land past all streams
        remote_ids, local_ids = [block.ref.block_id for block in blocks], [block.block_id for block in blocks]
        try:
            agent = self._connected(job.peer)
            flight.agent = agent  # from here on bytes may be on their way
            flight.read = agent.start(job.peer.memory.agent, remote_ids, local_ids)
        except TransferError as failure:
            self._fail(flight, failure.message)

    def _connect_ahead(self, peer: _Peer) -> None:
        try:
            self._connected(peer)
        except TransferError as error:
            log.warning("cannot connect to a peer", extra={"peer": peer.info.name, "reason": error.message})
            peer.is_lost = True

    def _connected(self, peer: _Peer) -> ReadingAgent:
        """The reading agent, connected to `peer`. Raises `TransferError`."""
        if self._reading is None:
            self._reading = ReadingAgent(self._library, f"{self._peer_name}-{self._epoch}-read", self._view)
        if peer.memory.agent not in self._reading.connected:
            self._forget_former_peers(self._reading)
            self._reading.connect(peer.memory)
        return self._reading

    def _forget_former_peers(self, reading: ReadingAgent) -> None:
        current = {peer.memory.agent for peer in list(self._peers.values())}
        in_use = {flight.job.peer.memory.agent for flight in self._flights}
        for agent in reading.connected - current - in_use:
            try:
                reading.disconnect(agent)
            except TransferError as error:
                # It went away by itself; what is left of it goes with the reading agent.
                log.debug("former peer could not be removed", extra={"agent": agent, "reason": error.message})

    def _check_flights(self) -> bool:
        """Reports what is done, and fails what failed or is overdue. True where there was something."""
        is_busy = False
        now = time.monotonic()
        for flight in list(self._flights):
            if flight.agent is None or flight.read is None:
                continue
            try:
                if flight.agent.check(flight.read):
                    self._report(flight)
                elif now >= flight.job.deadline:
                    self._fail(flight, f"not done within {self._config.transfer_timeout_s} s")
                else:
                    continue
            except TransferError as failure:
                self._fail(flight, failure.message)
            is_busy = True
        return is_busy

    def _fail(self, flight: _Flight, error: str) -> None:
        """Dooms the flight's agent: it begins no more reads, and ends with its last good one. Then, when no byte can
        land any more, the flight is reported. Every read has a deadline, so that comes soon."""
        peer = flight.job.peer
        if not peer.is_lost:
            log.warning("KV reads from a peer fail", extra={"peer": peer.info.name, "reason": error})
        peer.is_lost = True
        if flight.agent is None:
            self._report(flight, error)
            return
        self._flights.remove(flight)
        self._doomed.setdefault(flight.agent, []).append((flight, error))
        if self._reading is flight.agent:
            self._reading = None

    def _end_doomed_agents(self) -> None:
        in_use = {flight.agent for flight in self._flights}
        for agent in [agent for agent in self._doomed if agent not in in_use]:
            agent.close()
            for flight, error in self._doomed.pop(agent):
                self._flights.append(flight)
                self._report(flight, error)

    def _report(self, flight: _Flight, error: str | None = None) -> None:
        """Gives the results of a flight that no byte will come of any more."""
        self._flights.remove(flight)
        flight.job.peer.num_reads -= 1
        errors = [error] * len(flight.blocks) if error is not None else self._verify(flight)
        self._results.add(
            _fetched(flight.job.job_id, block, error=block_error, num_bytes=self._view.block_bytes)
            for block, block_error in zip(flight.blocks, errors, strict=True)
        )

    def _verify(self, flight: _Flight) -> list[str | None]:
        """What is wrong with each block that arrived."""
        if not self._config.verify_checksums:
            return [None] * len(flight.blocks)
        self._fetch_staging = self._fetch_staging or Staging(self._view, self._slice_blocks)
        loaded = self._fetch_staging.load([block.block_id for block in flight.blocks], None)
        return [
            None
            if block.ref.checksum in (None, xxhash.xxh3_64_intdigest(data))
            else f"block {block.ref.block_id} of peer {block.ref.peer!r} fails its checksum"
            for block, data in zip(flight.blocks, loaded, strict=True)
        ]


def _refusal(ref: BlockRef, peer: _Peer | None) -> str | None:
    """Why `ref` can't be read from the peer of its name as we know it now."""
    if peer is None:
        return f"peer {ref.peer!r} is not known here"
    if ref.epoch != peer.info.epoch:
        return f"peer {ref.peer!r} has restarted since it announced the block"
    if peer.is_lost:
        return f"peer {ref.peer!r} was lost"
    if not 0 <= ref.block_id < peer.memory.num_blocks:
        return f"peer {ref.peer!r} has no block {ref.block_id}"
    return None


def _fetched(job_id: int, block: FetchBlock, *, error: str | None, num_bytes: int = 0) -> TransferResult:
    return TransferResult(
        job_id=job_id,
        kind=TransferKind.FETCH,
        index=block.ref.index,
        block_id=block.block_id,
        error=error,
        num_bytes=0 if error else num_bytes,
    )
