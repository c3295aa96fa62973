"""Stored blocks of one layout that workers of any tensor-parallel degree wrote.

Each rank writes blocks of its own, into a folder of its own. A rank looks for a block in its own folder first, then in
those of the other degrees that the model's heads allow. In another degree, the heads that this rank needs lie with one
rank or with several. This rank reads the blocks of those ranks whole, since checksums cover whole blocks, and takes its
heads out of them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from common.errors import TransferError
from common.types import KVCacheSpec
from kv_store.shards import CommonPart, degrees, sources_of, take_part
from kv_store.shared_storage.block_files import BlockFiles
from kv_store.shared_storage.file_clock import FileClock

log = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class _Source:
    """One rank of another degree, and what we need of its blocks."""

    part: CommonPart
    spec: KVCacheSpec
    files: BlockFiles


class ShardedFiles:
    """Looks up and reads as `BlockFiles` does; what is written goes to `own`.

    Every method does I/O; any thread may call any of them.
    """

    def __init__(self, kv_dir: Path, spec: KVCacheSpec, clock: FileClock) -> None:
        self.own = BlockFiles(kv_dir, spec, clock)
        self._spec = spec
        self._others = [
            [_Source(part, shard, BlockFiles(kv_dir, shard, clock)) for part, shard in sources_of(spec, tp_size)]
            for tp_size in degrees(spec)
            if tp_size != spec.tp_size
        ]

    def contains(self, block_hash: bytes) -> bool:
        """One stat if we wrote it ourselves; each other degree costs one more, and some if it has a folder."""
        return self.own.contains(block_hash) or any(_holds(sources, block_hash) for sources in self._others)

    def forget(self, block_hashes: Sequence[bytes]) -> int:
        """Deletes these blocks, of whatever degree. Returns how many there were. Raises `OSError`."""
        found = self.own.forget(block_hashes)
        for sources in self._others:
            for source in sources:
                found |= source.files.forget(block_hashes)
        return len(found)

    def read(self, wanted: Sequence[tuple[bytes, memoryview]]) -> list[TransferError | None]:
        outcomes = self.own.read(wanted)
        for sources in self._others:
            missing = [
                position
                for position, (block_hash, _) in enumerate(wanted)
                if outcomes[position] is not None and _holds(sources, block_hash)
            ]
            if missing:
                found = self._read_others(sources, [wanted[position] for position in missing])
                for position, outcome in zip(missing, found, strict=True):
                    log.debug(
                        "KV block read from another degree's files", extra={"instead_of": str(outcomes[position])}
                    )
                    outcomes[position] = outcome
        return outcomes

    def _read_others(
        self, sources: Sequence[_Source], wanted: Sequence[tuple[bytes, memoryview]]
    ) -> list[TransferError | None]:
        outcomes: list[TransferError | None] = [None] * len(wanted)
        for source in sources:
            blocks = np.empty((len(wanted), source.spec.block_bytes), dtype=np.uint8)
            errors = source.files.read([(block_hash, blocks[i].data) for i, (block_hash, _) in enumerate(wanted)])
            for i, error in enumerate(errors):
                if error is not None:
                    outcomes[i] = error
                    continue
                take_part(source.part, self._spec, source.spec, blocks[i].data, wanted[i][1])
        return outcomes


def _holds(sources: Sequence[_Source], block_hash: bytes) -> bool:
    """Whether each of the ranks has the block. Most degrees were never used: one look says so."""
    return os.path.isdir(sources[0].files.layout.blocks) and all(
        source.files.contains(block_hash) for source in sources
    )
