"""The connectors of a worker's ranks as one connector, of which the engine sees no more than of any other.

Every rank fetches every block, and a transfer has ended when it has on all ranks. It failed if it did on one: what the
others brought is as good as nothing. Ranks that are more than the KV heads share them: of those that keep the same
heads, the first one publishes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import msgspec

from common.types import KVCacheSpec
from kv_store.base import (
    Eviction,
    FetchBlock,
    KVConnector,
    LocalBlock,
    Lookup,
    TransferKind,
    TransferResult,
)
from kv_store.peers import join_peers, join_refs

if TYPE_CHECKING:
    from kv_store.base import KVCache


def join_connectors(ranks: Sequence[KVConnector]) -> KVConnector:
    """`ranks`: of one class, by rank, none registered yet."""
    first = ranks[0]

    class Joined(_JoinedConnector):
        name: ClassVar[str] = first.name
        is_store: ClassVar[bool] = first.is_store
        keeps_blocks: ClassVar[bool] = first.keeps_blocks

    return Joined(ranks)


@dataclass(slots=True)
class _Transfer:
    """One block's, on its way on some ranks."""

    due: set[int]  # ranks without a final result
    results: dict[int, TransferResult] = field(default_factory=dict)  # final ones by rank
    error: str | None = None  # of the first rank that failed
    is_told: bool = False  # that it failed, before it had ended


class _EvictionOfAll(Eviction):
    """Done when all ranks are. The store had as many blocks as the rank that had the most."""

    def __init__(self, ranks: Sequence[Eviction]) -> None:
        self._ranks = ranks

    @property
    def num_blocks(self) -> int | None:  # type: ignore[override]
        counts = [rank.num_blocks for rank in self._ranks]
        return None if None in counts else max(count or 0 for count in counts)

    @property
    def failure(self) -> str:  # type: ignore[override]
        return next((rank.failure for rank in self._ranks if rank.failure), "")


class _JoinedConnector(KVConnector):
    def __init__(self, ranks: Sequence[KVConnector]) -> None:
        self._ranks = ranks
        self._publishing: list[int] = []  # the first rank of each shard
        self._transfers: dict[tuple[int, int, int], _Transfer] = {}  # by job, index and block

    def register_kv_cache(self, cache: KVCache, spec: KVCacheSpec, wake: Callable[[], None]) -> None:
        self.register_shards([(cache, spec)], wake)

    def register_shards(self, shards: Sequence[tuple[KVCache, KVCacheSpec]], wake: Callable[[], None]) -> None:
        first = {spec.tp_rank: rank for rank, (_, spec) in reversed(list(enumerate(shards)))}
        self._publishing = sorted(first.values())
        for rank, (cache, spec) in zip(self._ranks, shards, strict=True):
            rank.register_kv_cache(cache, spec, wake)

    def describe(self) -> bytes:
        descriptions = [self._ranks[rank].describe() for rank in self._publishing]
        return join_peers(descriptions) if all(descriptions) else b""

    def add_peer(self, peer: bytes) -> None:
        for rank in self._ranks:
            rank.add_peer(peer)

    def lookup(self, block_hashes: Sequence[bytes]) -> int:
        """Rank 0's: all ranks store the same blocks, and what one has lost is found out by fetching."""
        return self._ranks[0].lookup(block_hashes)

    def start_lookup(self, block_hashes: Sequence[bytes]) -> Lookup:
        return self._ranks[0].start_lookup(block_hashes)

    def touch(self, block_hashes: Sequence[bytes]) -> None:
        for rank in self._publishing:
            self._ranks[rank].touch(block_hashes)

    def evict(self, block_hashes: Sequence[bytes]) -> Eviction:
        return _EvictionOfAll([self._ranks[rank].evict(block_hashes) for rank in self._publishing])

    def publish(self, job_id: int, blocks: Sequence[LocalBlock]) -> None:
        self._expect(self._publishing, ((job_id, block.index, block.block_id) for block in blocks))
        for rank in self._publishing:
            self._ranks[rank].publish(job_id, blocks)

    def fetch(self, job_id: int, blocks: Sequence[FetchBlock]) -> None:
        self._expect(range(len(self._ranks)), ((job_id, block.ref.index, block.block_id) for block in blocks))
        for rank in self._ranks:
            rank.fetch(job_id, blocks)

    def poll(self) -> list[TransferResult]:
        joined = []
        for rank, connector in enumerate(self._ranks):
            for result in connector.poll():
                if (told := self._joined(rank, result)) is not None:
                    joined.append(told)
        return joined

    def release(self, job_id: int) -> None:
        for rank in self._ranks:
            rank.release(job_id)

    def close(self) -> None:
        for rank in self._ranks:
            rank.close()

    def _expect(self, ranks: Iterable[int], keys: Iterable[tuple[int, int, int]]) -> None:
        for key in keys:
            self._transfers[key] = _Transfer(set(ranks))

    def _joined(self, rank: int, result: TransferResult) -> TransferResult | None:
        """What a rank's result says of all of them; None if that is nothing yet."""
        key = result.job_id, result.index, result.block_id
        transfer = self._transfers[key]
        if result.error is not None and transfer.error is None:
            transfer.error = f"rank {rank}: {result.error}"
        if not result.is_final:
            if transfer.is_told:
                return None
            transfer.is_told = True
            return msgspec.structs.replace(result, error=transfer.error)
        transfer.due.discard(rank)
        transfer.results[rank] = result
        if transfer.due:
            return None
        del self._transfers[key]
        results = [transfer.results[number] for number in sorted(transfer.results)]
        if transfer.error is not None:
            return msgspec.structs.replace(result, error=transfer.error, ref=None, num_bytes=0)
        refs = [one.ref for one in results if one.ref is not None]
        return msgspec.structs.replace(
            result,
            ref=join_refs(refs) if result.kind is TransferKind.PUBLISH and len(refs) == len(results) else None,
            num_bytes=sum(one.num_bytes for one in results),
        )
