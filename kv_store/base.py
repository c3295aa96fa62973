"""The connector interface: moves KV blocks between one worker's cache and somewhere else.

A connector is ignorant of requests. Block ids, hashes and bytes go in; results come out, block by block.

Threads: the engine calls every method from one thread and never waits inside one. A connector may run threads of its
own; they call `wake` (see `register_kv_cache`) when `poll` has something new.

Ownership, which is what keeps wrong bytes away:
- `publish`: the producer keeps the block's bytes unchanged until its final result has come, and, for a P2P connector
  (`is_store` False), until `release` of that job as well, since peers read the cache itself.
- `fetch`: the destination belongs to the connector until the block's final result has come, which, good or bad,
  means that no byte will land there any more. Until then the caller must not hand the block on, whatever happened to
  the request. There is no cancel: a fetch that is not wanted any more is waited for.
- Every block given to `publish` or `fetch` gets exactly one final result. Deadlines are the connector's own.
- A transfer that is overdue and cannot be stopped may first have a result that is not final: the block counts as failed
  from then on, but stays the connector's until the final one.

Tensor parallelism: a worker of degree n has n connectors, one per rank, each over its rank's cache (see
`kv_store.shards`). All ranks have the same number of blocks, and a block has the same id on all of them; each is given
the same jobs. To others they look like one connector (`kv_store.ranks`): `kv_store.peers.join_peers` joins their
descriptions and `join_refs` their references, so that a block is published once. The reading worker may have another
degree.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar, TypeAlias, TypeVar

import msgspec

from common.config import Settings
from common.types import KVCacheSpec

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch  # a worker's gRPC front uses these types without loading torch

    KVCache: TypeAlias = torch.Tensor | npt.NDArray[np.float32]
    """One shard of a worker's KV: a tensor on any device, or an array of a device that has no torch."""


S = TypeVar("S", bound=Settings)


class BlockRef(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What a producer publishes: one block, readable until the producer's lease on it ends.

    `peer`, `epoch` and `block_id` say where a P2P block lies: on every rank of that worker. Stores go by `block_hash`
    and leave them empty, but for a hint of their own in `peer`.
    """

    index: int  # position in the request's block table
    block_hash: bytes
    peer: str = ""
    epoch: str = ""
    block_id: int = 0
    checksums: tuple[int, ...] = ()  # see `kv_store.checksums`; empty if the producer computes none
    staged_slots: tuple[int, ...] = ()  # by rank: where the bytes are to be read instead (see `kv_store.nixl.slots`)


class LocalBlock(msgspec.Struct, frozen=True, gc=False):
    """One block of this worker's own cache, to be published."""

    index: int  # position in the request's block table
    block_id: int
    block_hash: bytes
    is_partial: bool = False  # the tail of a prompt that fills it in part: no other prompt asks for its hash


class FetchBlock(msgspec.Struct, frozen=True, gc=False):
    """One block to be brought: from `ref`, into `block_id` of this worker's cache."""

    ref: BlockRef
    block_id: int


@dataclass(slots=True)
class Lookup:
    """The answer to `start_lookup`. A thread of the connector may set it, and then calls `wake`."""

    num_blocks: int | None = None  # leading blocks that the store holds; None until it is known
    is_certain: bool = False  # the store has answered: if there are more blocks, it lacks the next one


@dataclass(slots=True)
class Eviction:
    """The answer to `evict`. A thread of the connector may set it, and then calls `wake`."""

    num_blocks: int | None = None  # that the store had; None until it is done. Set last
    failure: str = ""  # why it may have some still


class TransferKind(StrEnum):
    PUBLISH = "publish"
    FETCH = "fetch"


class TransferResult(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The end of one block's transfer.

    `error` is None if it went well, else one line that says why. `ref` is set for a published block: how others
    name it. `num_bytes` counts bytes moved; 0 if the store already held the block or nothing had to move.
    If `is_final` is False there is an error, and bytes may still be moved: the final result comes later.
    """

    job_id: int
    kind: TransferKind
    index: int
    block_id: int
    error: str | None = None
    ref: BlockRef | None = None
    num_bytes: int = 0
    is_final: bool = True


@dataclass(slots=True, frozen=True, kw_only=True)
class ConnectorConfig:
    """What any connector may need."""

    epoch: str = ""  # this worker's incarnation, new at each start of the process
    worker_id: str = ""  # the same in its next life, if that can be known
    num_io_threads: int = 2
    transfer_timeout_s: float = 10.0  # one block's fetch fails after this
    verify_checksums: bool = False  # P2P: the producer computes checksums; stores always do. Consumers verify all
    section: Mapping[str, object] = field(default_factory=dict)  # single connectors' own settings, by name

    def own(self, settings_class: type[S]) -> S:
        return own_part(self.section, settings_class)


def own_part(section: Mapping[str, object], settings_class: type[S]) -> S:
    """What `section` has for the fields of `settings_class`; defaults for the rest."""
    return settings_class.model_validate(
        {name: section[name] for name in settings_class.model_fields if name in section}
    )


class KVConnector(ABC):
    """See the module's docstring for threads and ownership."""

    name: ClassVar[str]
    is_store: ClassVar[bool]
    """True: blocks are named by hash, outlive their producer, and `lookup` finds them."""
    keeps_blocks: ClassVar[bool] = True
    """False: a store that takes nothing, so nothing is queued to be written to it."""

    @abstractmethod
    def __init__(self, config: ConnectorConfig) -> None:
        """Raises `StartupError` with one line if it cannot work here (directory read-only, library missing)."""

    @abstractmethod
    def register_kv_cache(self, cache: KVCache, spec: KVCacheSpec, wake: Callable[[], None]) -> None:
        """Called once, before anything else. `cache` is contiguous `[num_blocks, *spec.block_shape]` of `spec.dtype`,
        on any device, and outlives the connector. `wake` may be called from any thread."""

    def register_shards(self, shards: Sequence[tuple[KVCache, KVCacheSpec]], wake: Callable[[], None]) -> None:
        """`register_kv_cache` with the caches of all ranks. A connector of one rank takes one."""
        ((cache, spec),) = shards
        self.register_kv_cache(cache, spec, wake)

    @abstractmethod
    def describe(self) -> bytes:
        """Opaque bytes that let a peer's `add_peer` reach this connector; empty if none are needed. Those of all
        ranks of a worker go through `kv_store.peers.join_peers` first."""

    @abstractmethod
    def add_peer(self, peer: bytes) -> None:
        """Makes the connector behind `peer` (its `describe()`) reachable, instead of a former life of the same name.
        The engine calls this for each request that may fetch from the peer; a connector may forget peers that are not
        used for long.

        Raises `IncompatibleError` if the two can never exchange blocks, `TransferError` if the peer can't be
        reached now.
        """

    @abstractmethod
    def lookup(self, block_hashes: Sequence[bytes]) -> int:
        """How many leading blocks of `block_hashes` the store holds; 0 for P2P connectors. This is a hint: a fetch may
        still fail."""

    def start_lookup(self, block_hashes: Sequence[bytes]) -> Lookup:
        """`lookup` for callers that cannot wait: the answer comes now or soon. If `lookup` may have to wait for the
        store, the connector answers from a thread of its own, within a bounded time even if the store hangs."""
        return Lookup(self.lookup(block_hashes), is_certain=True)

    def touch(self, block_hashes: Sequence[bytes]) -> None:  # noqa: B027
        """Has a store that evicts count these blocks as used now, as far as it has them. This is a hint, and never
        waits."""

    def evict(self, block_hashes: Sequence[bytes]) -> Eviction:  # noqa: ARG002
        """Has a store forget these blocks. Never waits: the answer comes now or later."""
        return Eviction(0, f"{self.name} evicts nothing on request" if self.is_store else "")

    @abstractmethod
    def publish(self, job_id: int, blocks: Sequence[LocalBlock]) -> None:
        """Starts to make `blocks` readable by others. `job_id` is new with each call to `publish` or `fetch`."""

    @abstractmethod
    def fetch(self, job_id: int, blocks: Sequence[FetchBlock]) -> None:
        """Starts to bring `blocks`. Never blocks and never raises for what a peer or store did: that is a result."""

    @abstractmethod
    def poll(self) -> list[TransferResult]:
        """Returns results since the last call, in the order in which they came."""

    @abstractmethod
    def release(self, job_id: int) -> None:
        """The lease on what `job_id` published has ended. Unknown jobs are ignored."""

    @abstractmethod
    def close(self) -> None:
        """Stops threads and releases the cache. Results that are still due do not come."""
