"""Blocks of this worker's cache that a request lends to the prefill worker that computes the rest of its prompt. Pure.

The next turn of a conversation begins with blocks that the last turn left on the decode worker, above all those of its
answer. The prefill worker that computes the new part of the prompt needs these blocks too, and reads the ones that it
lacks from the decode worker.

A loan outlives its request, since the prefill worker may not know yet that the request has ended.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.blocks.block_manager import BlockManager
from kv_store.base import LocalBlock


class Loans:
    def __init__(self, blocks: BlockManager) -> None:
        self._blocks = blocks
        self._lent: dict[str, list[int]] = {}  # by request id

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._lent

    def begin(self, request_id: str, blocks: Sequence[LocalBlock]) -> None:
        """Lends these blocks, which stay unchanged until `end`. A request lends once."""
        if request_id in self._lent:
            raise ValueError(f"request {request_id} has lent blocks already")
        self._lent[request_id] = [block.block_id for block in blocks]
        self._blocks.hold(self._lent[request_id])

    def end(self, request_id: str) -> None:
        """Ends the request's loan: the blocks are not read any more, or what is read is ignored. Ignores unknown
        ids."""
        for block_id in self._lent.pop(request_id, ()):
            self._blocks.unhold(block_id)
