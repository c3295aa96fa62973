"""The tier below the device: host memory holds what the device evicts, and the blocks of swapped requests. Pure.

Copies are decided here and carried out by the engine, in their order and before it computes; on a device, all on one
stream. A name may be on the device and in host memory at once: its next eviction then costs no copy.
"""

from __future__ import annotations

from collections.abc import Callable, KeysView, Sequence
from dataclasses import dataclass
from enum import StrEnum

from common.errors import InternalError
from engine.blocks.counts import CacheCounts
from engine.blocks.host_blocks import HostBlocks


class BlockCopyKind(StrEnum):
    SWAP_OUT = "swap out"  # device to host: a request gives its blocks up for a while
    SWAP_IN = "swap in"
    DEMOTE = "demote"  # device to host: a named block is evicted
    PROMOTE = "promote"


@dataclass(slots=True, frozen=True)
class BlockCopy:
    """Copy one whole block between the device's cache and the host's."""

    kind: BlockCopyKind
    device_block: int
    host_block: int

    @property
    def to_host(self) -> bool:
        return self.kind in (BlockCopyKind.SWAP_OUT, BlockCopyKind.DEMOTE)


class HostTier:
    def __init__(
        self,
        num_blocks: int,
        counts: CacheCounts,
        on_gone: Callable[[bytes], None],
        is_retained: Callable[[bytes], bool],
        *,
        keep_evicted: bool,
    ) -> None:
        """`keep_evicted`: it caches what the device evicts, besides swapped requests. `on_gone` hears of each name that
        made room here."""
        self.pool = HostBlocks(num_blocks, is_retained)
        self._is_retained = is_retained
        self._counts = counts
        self._on_gone = on_gone
        self.keeps_evicted = keep_evicted
        self.copies: list[BlockCopy] = []

    def __contains__(self, name: bytes) -> bool:
        return name in self.pool

    def names(self) -> KeysView[bytes]:
        return self.pool.names()

    def take_copies(self) -> list[BlockCopy]:
        """Copies decided since the last call. Carry them out in this order, before the blocks are used."""
        copies, self.copies = self.copies, []
        return copies

    def demote(self, block_id: int, name: bytes) -> bool:
        """Copies an evicted block to host memory. Returns False if there is no room: a retained block is not evicted
        for one that is not retained."""
        if name in self.pool:
            self.pool.touch(name)
            return True
        host_block = self._take(spare_retained=not self._is_retained(name)) if self.keeps_evicted else None
        if host_block is None:
            return False
        self.pool.keep(name, host_block)
        self.copies.append(BlockCopy(BlockCopyKind.DEMOTE, block_id, host_block))
        self._counts.demoted += 1
        return True

    def forget(self, name: bytes) -> bool:
        """Takes a name away. Returns whether it was here."""
        if name not in self.pool:
            return False
        self.pool.free([self.pool.take_named(name)])
        return True

    def promote(self, names: Sequence[bytes], take: Callable[[], int], put: Callable[[int, bytes], None]) -> None:
        """Copies blocks up, into blocks that `take` gives, and calls `put` for each as soon as it has one."""
        # Owned meanwhile, so that what is evicted for them does not take their place.
        host_blocks = [self.pool.take_named(name) for name in names]
        for name, host_block in zip(names, host_blocks, strict=True):
            block_id = take()
            self.copies.append(BlockCopy(BlockCopyKind.PROMOTE, block_id, host_block))
            put(block_id, name)
        for name, host_block in reversed(list(zip(names, host_blocks, strict=True))):
            self.pool.keep(name, host_block)
        self._counts.promoted += len(names)

    def swap_out(self, block_ids: Sequence[int]) -> list[int] | None:
        """Copies a request's blocks down. Returns the host blocks that hold them from now on. Returns None and changes
        nothing if there are too few."""
        if len(block_ids) > self.pool.num_available_blocks:
            return None
        host_blocks = []
        for block_id in block_ids:
            host_block = self._take()
            if host_block is None:
                raise InternalError("host memory has fewer blocks than it said")
            host_blocks.append(host_block)
            self.copies.append(BlockCopy(BlockCopyKind.SWAP_OUT, block_id, host_block))
        self._counts.swapped_out += len(block_ids)
        return host_blocks

    def swap_in(self, host_blocks: Sequence[int], block_ids: Sequence[int]) -> None:
        """Copies a request's blocks up and gives their host blocks back."""
        pairs = zip(block_ids, host_blocks, strict=True)
        self.copies += [BlockCopy(BlockCopyKind.SWAP_IN, block_id, host_block) for block_id, host_block in pairs]
        self.pool.free(host_blocks)

    def _take(self, *, spare_retained: bool = False) -> int | None:
        taken = self.pool.take(spare_retained=spare_retained)
        if taken is None:
            return None
        host_block, gone = taken
        if gone is not None:
            self._on_gone(gone)
        return host_block
