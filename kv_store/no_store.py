"""The store of a worker that has none: it holds nothing, and nothing is written to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar

from common.types import KVCacheSpec
from kv_store.base import Eviction, FetchBlock, KVConnector, LocalBlock, TransferKind, TransferResult

if TYPE_CHECKING:
    from kv_store.base import KVCache


class NoStore(KVConnector):
    """Every transfer fails, but nobody starts one: no lookup finds a block, and `engine.blocks` queues none."""

    name: ClassVar[str] = "none"
    is_store: ClassVar[bool] = True
    keeps_blocks: ClassVar[bool] = False

    def __init__(self) -> None:
        self._results: list[TransferResult] = []

    def register_kv_cache(self, cache: KVCache, spec: KVCacheSpec, wake: Callable[[], None]) -> None:
        """Nothing to do."""

    def register_shards(self, shards: Sequence[tuple[KVCache, KVCacheSpec]], wake: Callable[[], None]) -> None:
        """Nothing to do."""

    def describe(self) -> bytes:
        return b""

    def add_peer(self, peer: bytes) -> None:
        """Nothing to do."""

    def lookup(self, block_hashes: Sequence[bytes]) -> int:  # noqa: ARG002
        return 0

    def evict(self, block_hashes: Sequence[bytes]) -> Eviction:  # noqa: ARG002
        return Eviction(0)

    def publish(self, job_id: int, blocks: Sequence[LocalBlock]) -> None:
        for block in blocks:
            self._fail(job_id, TransferKind.PUBLISH, block.index, block.block_id)

    def fetch(self, job_id: int, blocks: Sequence[FetchBlock]) -> None:
        for block in blocks:
            self._fail(job_id, TransferKind.FETCH, block.ref.index, block.block_id)

    def poll(self) -> list[TransferResult]:
        results, self._results = self._results, []
        return results

    def release(self, job_id: int) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do."""

    def _fail(self, job_id: int, kind: TransferKind, index: int, block_id: int) -> None:
        error = "there is no store"
        self._results.append(TransferResult(job_id=job_id, kind=kind, index=index, block_id=block_id, error=error))
