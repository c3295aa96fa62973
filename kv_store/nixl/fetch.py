"""The consuming side of the NIXL connector: reads blocks of peers into this worker's cache.

One thread posts the reads, in slices of several blocks, the jobs in turns, and watches them; nothing else drives them.
A read that fails, or that is not done by its deadline, costs the whole reading agent (see `kv_store.nixl.agent` for
why): new reads get another one, the good ones on the old finish, then it ends, and only then is the failure reported.
So every result means what it says.

Of a peer of another tensor-parallel degree, each block is read in runs, from one rank or from several. If the
transport cannot reach the cache, reads land in host memory, and are copied into the cache from there.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType

import msgspec
import numpy as np
import torch

from common.errors import TransferError
from common.types import KVCacheSpec
from kv_store.base import BlockRef, FetchBlock, TransferKind
from kv_store.cache_view import CacheView
from kv_store.checksums import Bytes, checksum_error
from kv_store.fair_queue import FairQueue
from kv_store.host_copy import HostCopy
from kv_store.jobs import Job
from kv_store.nixl.agent import Read, ReadingAgent, ServedMemory
from kv_store.nixl.publish import ReadReport
from kv_store.peers import PeerInfo
from kv_store.results import ResultQueue, fetched
from kv_store.shards import CommonPart, runs

log = logging.getLogger(__name__)

MAX_READS_PER_PEER = 4  # in flight: enough to keep a link busy, and a peer that hangs holds up no other
_LONE_FACTOR = 8  # slices that a job gets at once while no other waits: 0.2 ms between two are 3 % of one such read
_MIN_PAUSE_S, _MAX_PAUSE_S = 50e-6, 300e-6  # between two looks at reads in flight
_MIN_IDLE_S, _MAX_IDLE_S = 1e-3, 1.0  # poll interval while no peer is connected, counted from the last request
_JOIN_TIMEOUT_S = 5.0
PEER_KEEP_S = 1200.0  # unused peers: a request's default deadline, twice, as its blocks may come long after `add_peer`
_FORGET_INTERVAL_S = 1.0


@dataclass(slots=True, eq=False)
class Peer:
    info: PeerInfo
    sources: list[tuple[CommonPart, ServedMemory]]  # the ranks that hold something of ours
    is_lost: bool = False  # a read failed; until the peer is added again, so do all others, at once
    num_reads: int = 0  # in flight
    used_at: float = field(default_factory=time.monotonic)  # added or fetched from

    @property
    def agents(self) -> list[str]:
        return [memory.agent for _, memory in self.sources]


@dataclass(slots=True, frozen=True, eq=False)
class _PeerJob(Job):
    """The blocks of a job that one peer has; without blocks, the job only connects to the peer."""

    peer: Peer


@dataclass(slots=True, eq=False)
class _Flight:
    """A slice that was taken from the queue and whose results are due."""

    job: _PeerJob
    blocks: list[FetchBlock]
    slots: list[int] = field(default_factory=list)  # of the pool, if reads land there
    agent: ReadingAgent | None = None
    reads: list[Read] = field(default_factory=list)  # one of each rank


class Fetcher:
    """`pool` is None if the transport reaches the cache. `name` begins the names of its agents."""

    def __init__(
        self,
        *,
        library: ModuleType,
        name: str,
        spec: KVCacheSpec,
        view: CacheView,
        results: ResultQueue,
        pool: HostCopy | None,
        slice_blocks: int,
        timeout_s: float,
    ) -> None:
        self._library = library
        self._name = name
        self._spec = spec
        self._view = view
        self._results = results
        self._pool = pool
        self._slice_blocks = slice_blocks
        self._timeout_s = timeout_s
        self._peers: dict[str, Peer] = {}  # by name, current epoch only
        self._peers_lock = threading.Lock()  # held to change them, and by `fetch`
        self._queue: FairQueue[_PeerJob, FetchBlock] = FairQueue()
        # The thread's own:
        self._reading: ReadingAgent | None = None
        self._flights: list[_Flight] = []
        self._doomed: dict[ReadingAgent, list[tuple[_Flight, str]]] = {}  # agents with a failed read, and those reads
        self._copy: HostCopy | None = None  # for checksums
        self._idle_s = _MIN_IDLE_S
        self._forget_at = 0.0
        self._free_slots = deque(range(pool.num_slots if pool is not None else 0))
        self._thread = threading.Thread(target=self._run, name="kv-nixl-fetch", daemon=True)
        self._thread.start()

    def add_peer(self, info: PeerInfo, sources: list[tuple[CommonPart, ServedMemory]]) -> None:
        """Begins to connect. Adding the peer again after a failed read allows further reads. Call it for each request:
        a peer that was neither added nor read from for `PEER_KEEP_S` is forgotten."""
        with self._peers_lock:
            added, known = Peer(info, sources), self._peers.get(info.name)
            if known is not None and not known.is_lost and known.agents == added.agents:
                known.used_at = added.used_at
                return
            self._peers[info.name] = added
        # A turn without blocks connects: that takes longer than a read, so it begins before the first block is
        # published.
        self._queue.put_turn(_PeerJob(0, TransferKind.FETCH, 0.0, None, added))

    def fetch(self, job_id: int, blocks: Sequence[FetchBlock]) -> None:
        begin = time.monotonic()
        after = self._view.mark()
        by_peer: dict[Peer, list[FetchBlock]] = {}
        with self._peers_lock:
            peers = {name: self._peers.get(name) for name in {block.ref.peer for block in blocks}}
            for peer in peers.values():
                if peer is not None:
                    peer.used_at = begin
        for block in blocks:
            peer = peers[block.ref.peer]
            error = _refusal(block.ref, peer)
            if peer is None or error is not None:
                self._results.add([fetched(job_id, block, error=error)])
            else:
                by_peer.setdefault(peer, []).append(block)
        for peer, peer_blocks in by_peer.items():
            self._queue.put(_PeerJob(job_id, TransferKind.FETCH, begin + self._timeout_s, after, peer), peer_blocks)

    def close(self) -> None:
        """Ends every read: no byte lands after this."""
        self._queue.close()
        self._thread.join(_JOIN_TIMEOUT_S)
        if self._thread.is_alive():
            log.warning("NIXL thread does not end", extra={"nixl_thread": self._thread.name})

    # ---------------------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        if not self._view.is_on_host:
            torch.cuda.set_device(self._view.device)
        pause_s = _MIN_PAUSE_S
        while not self._queue.is_closed:
            try:
                is_lone = self._queue.num_jobs <= 1
                room = self._slice_blocks * (_LONE_FACTOR if is_lone else 1)
                if self._pool is not None:
                    room = min(room, len(self._free_slots))
                taken = self._queue.take(
                    max(room, 1),
                    timeout_s=pause_s if self._flights or self._doomed else self._idle_s if self._reading else None,
                    accepts=lambda job, room=room: room > 0 and job.peer.num_reads < MAX_READS_PER_PEER,  # type: ignore[misc]
                    spare=self._slice_blocks if is_lone and self._pool is None else 0,
                )
                if taken is not None:
                    self._begin(*taken)
                is_busy = self._check_flights() or taken is not None
                self._end_doomed_agents()
                pause_s = _MIN_PAUSE_S if is_busy else min(2 * pause_s, _MAX_PAUSE_S)
                if not is_busy and not self._flights:
                    self._progress()
                    self._idle_s = min(4 * self._idle_s, _MAX_IDLE_S)
                if time.monotonic() >= self._forget_at:
                    self._forget_unused_peers()
                    self._forget_at = time.monotonic() + _FORGET_INTERVAL_S
            except Exception as error:
                # A defect. The blocks under way get their results all the same, and the thread lives on.
                log.exception("fetching KV blocks failed")
                for flight in list(self._flights):
                    self._fail(flight, f"{type(error).__name__}: {error}")
        for agent in {self._reading, *self._doomed, *(flight.agent for flight in self._flights)}:
            if agent is not None:
                agent.close()

    def _begin(self, job: _PeerJob, blocks: list[FetchBlock]) -> None:
        if not blocks:
            self._connect_ahead(job.peer)
            return
        flight = _Flight(job, blocks)
        self._flights.append(flight)
        job.peer.num_reads += 1
        error = _refusal(blocks[0].ref, self._peers.get(job.peer.info.name))
        if error is None and time.monotonic() >= job.deadline:
            error = f"not begun within {self._timeout_s} s"
        if error is not None:
            self._report(flight, error)
            return
        if job.after is not None:
            job.after.synchronize()  # reads land past all streams
        targets = [block.block_id for block in blocks]
        if self._pool is not None:
            targets = flight.slots = [self._free_slots.popleft() for _ in blocks]
        try:
            agent = self._connected(job.peer)
            flight.agent = agent  # from here on bytes may be on their way
            for part, memory in job.peer.sources:
                positions, report = self._positions(part, memory, blocks)
                flight.reads.append(agent.start(memory.agent, positions, targets, report))
                if report:
                    self._idle_s = _MIN_IDLE_S
        except TransferError as failure:
            self._fail(flight, failure.message)
        except Exception as failure:  # a defect, or a peer's: of this flight, not of all that are under way
            log.exception("reading KV blocks failed")
            self._fail(flight, f"{type(failure).__name__}: {failure}")

    def _positions(self, part: CommonPart, memory: ServedMemory, blocks: list[FetchBlock]) -> tuple[list[int], bytes]:
        """The blocks' positions in the memory that a rank of the peer serves, and the report for that rank when they
        have been read."""
        if not memory.is_staging:
            return [block.ref.block_id for block in blocks], b""
        tickets = [block.ref.staged_slots[part.rank] for block in blocks]
        report = ReadReport(self._spec.tp_size, self._spec.tp_rank, tickets)
        return [ticket % memory.num_blocks for ticket in tickets], msgspec.msgpack.encode(report)

    def _connect_ahead(self, peer: Peer) -> None:
        if self._peers.get(peer.info.name) is not peer:  # another peer was added since
            return
        try:
            self._connected(peer)
        except TransferError as error:
            log.warning("cannot connect to a peer", extra={"peer": peer.info.name, "reason": error.message})
            peer.is_lost = True

    def _connected(self, peer: Peer) -> ReadingAgent:
        """The reading agent, connected to all ranks of `peer` that we need. Raises `TransferError`."""
        if self._reading is None:
            rows = self._view.rows if self._pool is None else self._pool.rows
            self._reading = ReadingAgent(self._library, self._name, rows)
        for part, memory in peer.sources:
            if memory.agent not in self._reading.connected:
                self._forget_former_peers(self._reading)
                self._reading.connect(memory, runs(part, self._spec, peer.info.spec))
                self._idle_s = _MIN_IDLE_S
        return self._reading

    def _progress(self) -> None:
        """Makes progress on new connections, and on reports that wait to be sent."""
        try:
            if self._reading is not None:
                self._reading.progress()
        except TransferError as error:  # the next read from the same peer says more
            log.warning("NIXL makes no progress", extra={"reason": error.message})

    def _forget_unused_peers(self) -> None:
        unused_since = time.monotonic() - PEER_KEEP_S - self._timeout_s  # so no read of theirs waits for its turn
        with self._peers_lock:
            for name, peer in list(self._peers.items()):
                if peer.used_at < unused_since and not peer.num_reads:
                    del self._peers[name]
        if self._reading is not None:
            self._forget_former_peers(self._reading)

    def _forget_former_peers(self, reading: ReadingAgent) -> None:
        """Disconnects former lives and peers that are forgotten, once nothing is read from them."""
        current = {agent for peer in list(self._peers.values()) for agent in peer.agents}
        in_use = {agent for flight in self._flights for agent in flight.job.peer.agents}
        for agent in reading.connected - current - in_use:
            try:
                reading.disconnect(agent)
            except TransferError as error:
                # The peer went away by itself; what is left of it ends with the reading agent.
                log.debug("former peer could not be removed", extra={"agent": agent, "reason": error.message})

    def _check_flights(self) -> bool:
        """Reports reads that are done, have failed or are overdue. Returns whether there were any."""
        is_busy = False
        for flight in list(self._flights):
            if flight.agent is None or not flight.reads:
                continue
            try:
                are_done = [flight.agent.check(read) for read in flight.reads]
                is_late = time.monotonic() >= flight.job.deadline  # looked at last: a read seen done in time was
                late = f"not done within {self._timeout_s} s"
                if all(are_done):
                    # A worker that was stopped may notice late; the peer keeps its blocks for a limited time only.
                    self._report(flight, late if is_late else None)
                elif is_late:
                    self._fail(flight, late)
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
        """Reports the results of a flight of which no byte will land any more."""
        self._flights.remove(flight)
        flight.job.peer.num_reads -= 1
        errors: list[str | None] = [error] * len(flight.blocks)
        if error is None:
            try:
                errors = self._taken_in(flight)
            except Exception as failure:  # the device, or a defect
                log.exception("KV blocks that were read cannot be used")
                errors = [f"{type(failure).__name__}: {failure}"] * len(flight.blocks)
        self._free_slots.extend(flight.slots)
        self._results.add(
            fetched(flight.job.job_id, block, error=block_error, num_bytes=self._view.block_bytes)
            for block, block_error in zip(flight.blocks, errors, strict=True)
        )

    def _taken_in(self, flight: _Flight) -> list[str | None]:
        """What is wrong with each block that arrived; None if nothing is. Good blocks that arrived in the pool are
        copied into the cache."""
        errors = self._verify(flight)
        if self._pool is not None:
            block_ids = [block.block_id for block in flight.blocks]
            self._pool.store(block_ids, [error is None for error in errors], flight.job.after, flight.slots)
        return errors

    def _verify(self, flight: _Flight) -> list[str | None]:
        if not any(block.ref.checksums for block in flight.blocks):
            return [None] * len(flight.blocks)
        arrived: list[Bytes]
        if self._pool is not None:
            arrived = [self._pool.memory[slot] for slot in flight.slots]
        else:
            self._copy = self._copy or HostCopy(self._view, self._slice_blocks * (_LONE_FACTOR + 1))
            loaded = self._copy.load([block.block_id for block in flight.blocks], None)
            arrived = [np.frombuffer(data, dtype=np.uint8) for data in loaded]
        return [checksum_error(block.ref, data, self._spec) for block, data in zip(flight.blocks, arrived, strict=True)]


def _refusal(ref: BlockRef, peer: Peer | None) -> str | None:
    """Why `ref` cannot be read from the peer as it is known now."""
    if peer is None:
        return f"peer {ref.peer!r} is not known here"
    if ref.epoch != peer.info.epoch:
        return f"peer {ref.peer!r} has restarted since it published the block"
    if peer.is_lost:
        return f"peer {ref.peer!r} was lost"
    if not 0 <= ref.block_id < peer.info.num_blocks:
        return f"peer {ref.peer!r} has no block {ref.block_id}"
    is_staging = peer.sources[0][1].is_staging
    if len(ref.staged_slots) != (peer.info.spec.tp_size if is_staging else 0):
        return f"peer {ref.peer!r} does not say where on each rank it staged block {ref.block_id}"
    return None
