"""KV blocks from worker to worker over NIXL: RDMA, CUDA IPC, shared memory or TCP, whatever UCX finds between them.

The consumer reads (`kv_store.nixl.fetch`), the producer's process does little (`kv_store.nixl.publish`). Each
worker's cache is registered once. If UCX cannot register it (memory of a device that it was built without), or if
`nixl_staging` says so, this end goes through host memory: the producer copies what it publishes there, and the consumer
what it has read. The other end notices nothing.

Known limit, over TCP only: a producer whose consumer goes or gives up in mid-transfer may be aborted by UCX, above all
one that was stopped meanwhile (SIGSTOP, a frozen machine); docs/kv-plane.md says why. Its worker ends and has to be
restarted, as after any crash.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar

import msgspec

from common.errors import StartupError, TransferError
from common.types import KVCacheSpec
from kv_store.base import ConnectorConfig, FetchBlock, KVConnector, LocalBlock, TransferResult
from kv_store.cache_view import CacheView
from kv_store.host_copy import HostCopy
from kv_store.nixl.agent import ServedMemory, ServingAgent, load_library
from kv_store.nixl.fetch import MAX_READS_PER_PEER, Fetcher
from kv_store.nixl.publish import Publisher
from kv_store.nixl.settings import NixlSettings
from kv_store.peers import PeerInfo, check_compatible, decode_peer, encode_peer
from kv_store.results import ResultQueue

if TYPE_CHECKING:
    from kv_store.base import KVCache

log = logging.getLogger(__name__)

SLICE_BYTES = 8 << 20  # of one read: one turn of a job


class NixlConnector(KVConnector):
    """P2P. Memory of any device that UCX reaches; both ends register their whole cache once."""

    name: ClassVar[str] = "nixl"
    is_store: ClassVar[bool] = False

    def __init__(self, config: ConnectorConfig) -> None:
        self._config = config
        self._own = config.own(NixlSettings)
        self._library = load_library()
        self._peer_name = config.worker_id or f"nixl-{uuid.uuid4().hex}"
        self._epoch = config.epoch or uuid.uuid4().hex
        try:
            self._serving = ServingAgent(self._library, f"{self._peer_name}-{self._epoch}-serve")
        except StartupError:
            raise
        except Exception as error:
            raise StartupError(f"connector: NIXL cannot start: {type(error).__name__}: {error}") from error
        self._sides: tuple[Fetcher, Publisher] | None = None

    def register_kv_cache(self, cache: KVCache, spec: KVCacheSpec, wake: Callable[[], None]) -> None:
        """Raises `StartupError` if UCX cannot register the cache and staging is off."""
        self._spec = spec
        self._view = CacheView(cache, spec)
        self._results = ResultQueue(wake)
        slice_blocks = max(1, SLICE_BYTES // spec.block_bytes)
        self._memory, serve_pool = self._registered()
        fetch_pool = self._pool(3 * MAX_READS_PER_PEER * slice_blocks) if serve_pool is not None else None
        publisher = Publisher(
            spec=spec,
            view=self._view,
            serving=self._serving,
            results=self._results,
            peer_name=self._peer_name,
            epoch=self._epoch,
            pool=serve_pool,
            slice_blocks=slice_blocks,
            has_checksums=self._config.verify_checksums,
            timeout_s=self._config.transfer_timeout_s,
        )
        fetcher = Fetcher(
            library=self._library,
            name=f"{self._peer_name}-{self._epoch}-read",
            spec=spec,
            view=self._view,
            results=self._results,
            pool=fetch_pool,
            slice_blocks=slice_blocks,
            timeout_s=self._config.transfer_timeout_s,
        )
        self._sides = self._fetcher, self._publisher = fetcher, publisher

    def describe(self) -> bytes:
        info = PeerInfo(
            connector=self.name,
            name=self._peer_name,
            epoch=self._epoch,
            spec=self._spec,
            num_blocks=self._view.num_blocks,
            transports={self._spec.tp_rank: msgspec.msgpack.encode(self._memory)},
        )
        return encode_peer(info)

    def add_peer(self, peer: bytes) -> None:
        """Begins to connect. Adding the peer again after a failed read allows further reads."""
        info = decode_peer(peer)
        needed = check_compatible(self.name, self._spec, info)
        try:
            sources = [(part, msgspec.msgpack.decode(info.transports[part.rank], type=ServedMemory)) for part in needed]
            for _, memory in sources:
                memory.check(info.num_blocks, info.spec.block_bytes)
        except (msgspec.DecodeError, UnicodeDecodeError, TransferError) as error:
            raise TransferError(f"peer {info.name!r}: no description of its memory: {error}") from error
        self._fetcher.add_peer(info, sources)

    def lookup(self, block_hashes: Sequence[bytes]) -> int:  # noqa: ARG002
        return 0

    def publish(self, job_id: int, blocks: Sequence[LocalBlock]) -> None:
        self._publisher.publish(job_id, blocks)

    def fetch(self, job_id: int, blocks: Sequence[FetchBlock]) -> None:
        self._fetcher.fetch(job_id, blocks)

    def poll(self) -> list[TransferResult]:
        return self._results.drain()

    def release(self, job_id: int) -> None:
        """Frees staged blocks. Other blocks need nothing: peers only read them while the stream that published them
        lasts."""
        self._publisher.release(job_id)

    def close(self) -> None:
        if self._sides is not None:
            for side in self._sides:
                side.close()
        self._serving.close()

    def _registered(self) -> tuple[ServedMemory, HostCopy | None]:
        """The memory that peers read: the cache, or a staging pool if they cannot reach the cache."""
        staging = self._own.nixl_staging
        if staging != "always":
            try:
                return self._serving.register(self._view.rows), None
            except Exception as error:
                reason = f"NIXL cannot register memory of {self._view.device}: {type(error).__name__}: {error}"
            if staging == "never" or self._view.is_on_host:
                raise StartupError(f"connector: {reason}")
            log.warning("KV blocks go through host memory", extra={"reason": reason})
        pool = self._pool(int(self._own.nixl_staging_gb * 2**30) // self._spec.block_bytes)
        return self._serving.register(pool.rows, is_staging=True), pool

    def _pool(self, num_slots: int) -> HostCopy:
        return HostCopy(self._view, min(max(num_slots, 1), self._view.num_blocks), is_apart=True)
