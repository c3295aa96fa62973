"""Blocks on their way from worker to worker."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, ClassVar

from common.types import KVCacheSpec
from kv_store.base import BlockRef, FetchBlock, KVConnector, LocalBlock, TransferKind, TransferResult
from simulation.clock import VirtualClock

if TYPE_CHECKING:
    from kv_store.base import KVCache


@dataclass(slots=True, frozen=True, kw_only=True)
class LinkSpeed:
    bandwidth: float = 25e9  # bytes a second that a worker sends, and as many that it receives
    latency_s: float = 0.0002  # of a transfer, beside its bytes


class Network:
    """Every worker has one port in and one out; a transfer has both to itself, and waits for those before it."""

    def __init__(self, clock: VirtualClock, speed: LinkSpeed) -> None:
        self.clock = clock
        self.num_bytes = 0
        self.num_transfers = 0
        self.transfer_s = 0.0  # of all transfers, what they waited for others included
        self._speed = speed
        self._out_free: defaultdict[str, float] = defaultdict(float)
        self._in_free: defaultdict[str, float] = defaultdict(float)

    def send(self, source: str, target: str, num_bytes: int) -> float:
        """When they have arrived."""
        now = self.clock.now
        begin = max(now, self._out_free[source], self._in_free[target])
        end = begin + num_bytes / self._speed.bandwidth
        self._out_free[source] = self._in_free[target] = end
        arrived = end + self._speed.latency_s
        self.num_bytes += num_bytes
        self.num_transfers += 1
        self.transfer_s += arrived - now
        return arrived


class Link(KVConnector):
    """A P2P connector. Blocks of one fetch from one worker arrive together."""

    name: ClassVar[str] = "simulated"
    is_store: ClassVar[bool] = False

    def __init__(self, address: str, network: Network, block_bytes: int) -> None:
        self.is_held = False  # nothing arrives for as long
        self._address = address
        self._network = network
        self._block_bytes = block_bytes
        self._published: list[TransferResult] = []
        self._arriving: list[tuple[float, int, list[TransferResult]]] = []
        self._numbers = count()
        self._wake: Callable[[], None] = lambda: None

    def register_kv_cache(self, cache: KVCache, spec: KVCacheSpec, wake: Callable[[], None]) -> None:  # noqa: ARG002
        self._wake = wake

    def describe(self) -> bytes:
        return b""

    def add_peer(self, peer: bytes) -> None:
        """Everybody reaches everybody."""

    def lookup(self, block_hashes: Sequence[bytes]) -> int:  # noqa: ARG002
        return 0

    def publish(self, job_id: int, blocks: Sequence[LocalBlock]) -> None:
        for one in blocks:
            ref = BlockRef(index=one.index, block_hash=one.block_hash, peer=self._address, block_id=one.block_id)
            self._published.append(
                TransferResult(
                    job_id=job_id, kind=TransferKind.PUBLISH, index=one.index, block_id=one.block_id, ref=ref
                )
            )

    def fetch(self, job_id: int, blocks: Sequence[FetchBlock]) -> None:
        by_peer: dict[str, list[TransferResult]] = {}
        for one in blocks:
            by_peer.setdefault(one.ref.peer, []).append(
                TransferResult(
                    job_id=job_id,
                    kind=TransferKind.FETCH,
                    index=one.ref.index,
                    block_id=one.block_id,
                    num_bytes=self._block_bytes,
                )
            )
        for peer, results in by_peer.items():
            arrived = self._network.send(peer, self._address, len(results) * self._block_bytes)
            heapq.heappush(self._arriving, (arrived, next(self._numbers), results))
            self._network.clock.at(arrived, self._wake)

    def poll(self) -> list[TransferResult]:
        results, self._published = self._published, []
        while self._arriving and self._arriving[0][0] <= self._network.clock.now and not self.is_held:
            results += heapq.heappop(self._arriving)[2]
        return results

    def release(self, job_id: int) -> None:
        """Nothing is kept for it."""

    def close(self) -> None:
        """Nothing runs."""
