"""Computes blocks that several prompts have in common only once, for the first request that needs them. Pure.

A newcomer waits in the queue, without blocks, while the next block that it lacks is being computed or fetched for
another request. A running prompt stops before a block that another request computes in the same step, and takes that
block over in the next step. Neither costs time, since the block would not be there sooner.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set

from engine.blocks.block_manager import BlockManager
from engine.messages import RequestMode
from engine.remote_kv import WaitingRoom
from engine.request import Request, RequestStatus


class EqualPrompts:
    def __init__(self, blocks: BlockManager, room: WaitingRoom) -> None:
        self._cache = blocks.cache
        self._block_size = blocks.block_size
        self._waiting_room = room

    def next_blocks(self, running: Iterable[Request]) -> Mapping[bytes, int]:
        """Blocks that no cache holds yet and that the next steps of running prompts complete: index by name."""
        if not self._cache.is_enabled:
            return {}
        places = ((one, one.num_computed_tokens // self._block_size) for one in running if one.num_missing_tokens > 1)
        names = {one.block_hashes[index]: index for one, index in places if index < one.num_tokens // self._block_size}
        return {name: index for name, index in names.items() if name not in self._cache}

    def is_held_back(self, request: Request, next_blocks: Mapping[bytes, int]) -> bool:
        """Whether the next block that the request lacks is being computed or fetched for another request.

        If the other request is preempted or ends, the first request that was held back computes the block.
        """
        if request.status is RequestStatus.SWAPPED or request.mode is RequestMode.PREFILL:
            return False  # a prefill's blocks are published as soon as each is there
        if request.needs_every_token or not self._cache.is_enabled:
            return False
        is_newcomer = request.status is RequestStatus.WAITING
        if is_newcomer and self._waiting_room.follows_only(request):
            return True
        if is_newcomer and request.mode is RequestMode.REMOTE:
            return False  # a prefill worker computes what it lacks
        names = self._cache.findable(request)
        return any(index < len(names) and names[index] == name for name, index in next_blocks.items())

    def up_to_known(self, request: Request, num_new: int, names_of_step: Set[bytes]) -> int:
        """`num_new`, or fewer: up to the first block that is cached by now or that another request computes in this
        step."""
        size = self._block_size
        start, last = request.num_computed_tokens, (request.num_tokens - 1) // size
        for index in range(start // size, min((start + num_new - 1) // size + 1, last)):
            name = request.block_hashes[index]
            if name in names_of_step or (index * size > start and name in self._cache):
                return max(index * size - start, 0)
        return num_new

    def names(self, request: Request, num_new: int) -> Sequence[bytes]:
        """Names of the blocks that the next `num_new` tokens of a prompt complete."""
        if not self._cache.is_enabled:
            return ()
        size, start = self._block_size, request.num_computed_tokens
        return request.block_hashes[start // size : (start + num_new) // size]
