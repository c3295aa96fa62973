"""Blocks copied between workers of one process. For tests, and the shortest example of a P2P connector.

It is stricter than real transports can be: it does not read a block that its producer has not published, or has
released.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar

from common.errors import TransferError
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
from kv_store.cache_view import CacheView
from kv_store.checksums import Bytes, checksum_error, head_checksums
from kv_store.peers import PeerInfo, check_compatible, decode_peer, encode_peer
from kv_store.results import ResultQueue, fetched
from kv_store.shards import CommonPart

if TYPE_CHECKING:
    from kv_store.base import KVCache

# One lock for all connectors of the process: a copy never meets a release, and this connector is not about speed.
_lock = threading.Lock()
_connectors: dict[tuple[str, int], MemoryConnector] = {}  # by name and tensor-parallel rank


class MemoryConnector(KVConnector):
    """Copies inside `fetch`; everything is done when it returns, and reported by `poll`."""

    name: ClassVar[str] = "memory"
    is_store: ClassVar[bool] = False

    def __init__(self, config: ConnectorConfig) -> None:
        self._config = config
        self._peer_name = config.worker_id or f"memory-{uuid.uuid4().hex}"
        self._epoch = config.epoch or uuid.uuid4().hex
        self._published: dict[int, dict[int, bytes]] = {}  # job_id -> block_id -> block_hash
        self._peers: dict[str, tuple[str, list[CommonPart]]] = {}  # name -> epoch, and what we need of its ranks

    def register_kv_cache(self, cache: KVCache, spec: KVCacheSpec, wake: Callable[[], None]) -> None:
        self._spec = spec
        self._view = CacheView(cache, spec)
        self._results = ResultQueue(wake)
        with _lock:
            _connectors[self._peer_name, spec.tp_rank] = self

    def describe(self) -> bytes:
        return encode_peer(
            PeerInfo(
                connector=self.name,
                name=self._peer_name,
                epoch=self._epoch,
                spec=self._spec,
                num_blocks=self._view.num_blocks,
                transports={self._spec.tp_rank: b""},
            )
        )

    def add_peer(self, peer: bytes) -> None:
        info = decode_peer(peer)
        needed = check_compatible(self.name, self._spec, info)
        with _lock:
            for part in needed:
                found = _connectors.get((info.name, part.rank))
                if found is None or found._epoch != info.epoch:
                    raise TransferError(f"peer {info.name!r} with epoch {info.epoch!r} is not in this process")
            self._peers[info.name] = info.epoch, needed

    def lookup(self, block_hashes: Sequence[bytes]) -> int:  # noqa: ARG002
        return 0

    def publish(self, job_id: int, blocks: Sequence[LocalBlock]) -> None:
        with _lock:
            self._published[job_id] = {block.block_id: block.block_hash for block in blocks}
        self._results.add(self._published_result(job_id, block) for block in blocks)

    def fetch(self, job_id: int, blocks: Sequence[FetchBlock]) -> None:
        self._results.add(self._fetch_block(job_id, block) for block in blocks)

    def poll(self) -> list[TransferResult]:
        return self._results.drain()

    def release(self, job_id: int) -> None:
        with _lock:
            self._published.pop(job_id, None)

    def close(self) -> None:
        with _lock:
            self._published.clear()
            for key in [key for key, connector in _connectors.items() if connector is self]:
                del _connectors[key]

    def _published_result(self, job_id: int, block: LocalBlock) -> TransferResult:
        ref = BlockRef(
            index=block.index,
            block_hash=block.block_hash,
            peer=self._peer_name,
            epoch=self._epoch,
            block_id=block.block_id,
            checksums=head_checksums(self._bytes(block.block_id), self._spec) if self._config.verify_checksums else (),
        )
        return TransferResult(
            job_id=job_id, kind=TransferKind.PUBLISH, index=block.index, block_id=block.block_id, ref=ref
        )

    def _fetch_block(self, job_id: int, block: FetchBlock) -> TransferResult:
        error: str | None = None
        try:
            self._copy(block)
        except TransferError as failure:
            error = failure.message
        return fetched(job_id, block, error=error, num_bytes=self._view.block_bytes)

    def _copy(self, block: FetchBlock) -> None:
        ref = block.ref
        with _lock:
            epoch, needed = self._peers.get(ref.peer, ("", []))
            if not needed:
                raise TransferError(f"peer {ref.peer!r} is not known here")
            for part in needed:
                producer = _connectors.get((ref.peer, part.rank))
                if producer is None:
                    raise TransferError(f"peer {ref.peer!r} is gone")
                if not ref.epoch == epoch == producer._epoch:
                    raise TransferError(f"peer {ref.peer!r} has restarted since it published the block")
                if not any(job.get(ref.block_id) == ref.block_hash for job in producer._published.values()):
                    raise TransferError(f"peer {ref.peer!r} holds no lease on block {ref.block_id}")
                local, remote = part.in_local(self._spec), part.in_remote(producer._spec)
                self._view.heads[block.block_id, *local] = producer._view.heads[ref.block_id, *remote]
        if error := checksum_error(ref, self._bytes(block.block_id), self._spec):
            raise TransferError(error)

    def _bytes(self, block_id: int) -> Bytes:
        return self._view.rows[block_id].cpu().numpy()
