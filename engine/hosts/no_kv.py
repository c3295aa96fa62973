"""In place of a connector, for workers whose KV caches lie on several hosts: no block comes or goes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar

from common.errors import IncompatibleError
from kv_store.base import ConnectorConfig, FetchBlock, KVConnector, LocalBlock, TransferKind, TransferResult

if TYPE_CHECKING:
    from common.types import KVCacheSpec
    from kv_store.base import KVCache

_REASON = "the ranks of this worker are on several hosts (--num-hosts): its KV blocks do not come or go"


class NoKV(KVConnector):
    name: ClassVar[str] = "none"
    is_store: ClassVar[bool] = False
    keeps_blocks: ClassVar[bool] = False

    def __init__(self, config: ConnectorConfig) -> None:  # noqa: ARG002
        self._results: list[TransferResult] = []
        self._wake: Callable[[], None] = lambda: None

    def register_kv_cache(self, cache: KVCache, spec: KVCacheSpec, wake: Callable[[], None]) -> None:  # noqa: ARG002
        self._wake = wake

    def describe(self) -> bytes:
        return b""

    def add_peer(self, peer: bytes) -> None:  # noqa: ARG002
        raise IncompatibleError(_REASON)

    def lookup(self, block_hashes: Sequence[bytes]) -> int:  # noqa: ARG002
        return 0

    def publish(self, job_id: int, blocks: Sequence[LocalBlock]) -> None:
        self._fail(job_id, TransferKind.PUBLISH, [(block.index, block.block_id) for block in blocks])

    def fetch(self, job_id: int, blocks: Sequence[FetchBlock]) -> None:
        self._fail(job_id, TransferKind.FETCH, [(block.ref.index, block.block_id) for block in blocks])

    def poll(self) -> list[TransferResult]:
        results, self._results = self._results, []
        return results

    def release(self, job_id: int) -> None:
        pass

    def close(self) -> None:
        pass

    def _fail(self, job_id: int, kind: TransferKind, blocks: Sequence[tuple[int, int]]) -> None:
        self._results += [
            TransferResult(job_id=job_id, kind=kind, index=index, block_id=block_id, error=_REASON)
            for index, block_id in blocks
        ]
        self._wake()
