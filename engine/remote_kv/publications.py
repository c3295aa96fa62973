"""Decides which blocks of a prefill are published for its decode worker, and when. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from engine.blocks.block_manager import BlockManager
from engine.messages import RequestMode
from engine.request import Request
from kv_store.base import LocalBlock


@dataclass(slots=True, frozen=True)
class Publish:
    """Blocks of a prefill that are computed and that its decode worker lacks."""

    request: Request
    blocks: list[LocalBlock]


def next_publication(request: Request, blocks: BlockManager, *, only_at_end: bool) -> list[Publish]:
    """The blocks of a prefill that became complete since the last call, its partial tail with the last chunk; at most
    one item. `only_at_end`: nothing before the whole prompt is computed."""
    if request.mode is not RequestMode.PREFILL:
        return []
    size = blocks.block_size
    is_done = request.num_computed_tokens >= request.num_prompt_tokens
    if only_at_end and not is_done:
        return []
    stop = blocks.blocks_for(request.num_prompt_tokens) if is_done else request.num_computed_tokens // size
    start = max(request.num_published_blocks, request.first_block)
    if start >= stop:
        return []
    blocks.cache.name_full_blocks(request)
    request.num_published_blocks = stop
    num_full = request.num_prompt_tokens // size
    local_blocks = [
        LocalBlock(
            index,
            request.block_ids[index],
            request.block_hashes[index] if index < num_full else blocks.cache.tail_hash(request),
            is_partial=index >= num_full,
        )
        for index in range(start, stop)
    ]
    return [Publish(request, local_blocks)]
