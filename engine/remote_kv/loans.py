"""Blocks of this worker's cache that a prefill worker reads: lent by the request whose prompt begins with them. Pure.

The next turn of a conversation finds on the decode worker what the last one computed there, its answer above all. The
prefill worker that computes the rest of the prompt has to see it, too. What it lacks of it, it reads here.

A loan outlives its request: whoever reads may not know yet that the request has ended.
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
        """These stay as they are until `end`. A request lends once."""
        if request_id in self._lent:
            raise ValueError(f"request {request_id} has lent blocks already")
        self._lent[request_id] = [block.block_id for block in blocks]
        self._blocks.hold(self._lent[request_id])

    def end(self, request_id: str) -> None:
        """Nobody reads them any more, or believes what was read. Unknown ids are ignored."""
        for block_id in self._lent.pop(request_id, ()):
            self._blocks.unhold(block_id)
