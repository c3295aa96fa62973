"""Checks which blocks another worker says that it published: each block that is due, once. Anything else is a
`TransferError`, raised before the engine, which other requests share, has seen the message. The engine compares the
blocks' names with those of the prompt (`engine.remote_kv`)."""

from __future__ import annotations

from collections.abc import Iterable

from common.errors import TransferError
from engine import messages as m
from protos.baton.v1 import prefill_pb2
from worker import convert

MAX_PEER_BYTES = 1 << 20  # of a connector's description: addresses and keys, some KiB
MAX_NAME_CHARS = 1024
MAX_NUMBERS = 4096  # of one reference: a checksum for each KV head, a slot for each rank
MAX_FAILURE_CHARS = 500


class PublishedBlocks:
    """Takes in messages about the blocks `due`. `field` names the message in errors."""

    def __init__(self, field: str, due: Iterable[int]) -> None:
        self.due = set(due)  # blocks that nothing has been said of
        self._field = field

    def take_in(self, engine_id: str, ready: prefill_pb2.BlocksReady) -> m.RemoteBlocksPublished:
        """Raises `TransferError`."""
        blocks = f"{self._field}.blocks"
        for block in ready.blocks:
            self._take(block.index, blocks)
            if max(len(block.peer), len(block.epoch)) > MAX_NAME_CHARS:
                raise TransferError(f"{blocks}: the name of its peer or epoch is too long")
            if max(len(block.checksums), len(block.staged_slots)) > MAX_NUMBERS:
                raise TransferError(f"{blocks}: too many checksums or slots")
        for index in ready.failed_indexes:
            self._take(index, f"{self._field}.failed_indexes")
        refs = [convert.block_ref(block) for block in ready.blocks]
        return m.RemoteBlocksPublished(engine_id, refs, list(ready.failed_indexes), ready.failure[:MAX_FAILURE_CHARS])

    def _take(self, index: int, field: str) -> None:
        if index not in self.due:
            raise TransferError(f"{field}: block {index} was not asked for, or was published before")
        self.due.remove(index)
