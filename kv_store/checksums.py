"""Checksums of P2P blocks: one for each KV head, so that a worker that has only some of the heads can verify them.

A head's checksum is the XXH3-64 of its bytes in the block, `[num_layers, num_planes, block_size, head_dim]`. A
reference carries those of all heads of the model in order, whatever the tensor-parallel degree of the worker that
publishes it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import xxhash

from common.types import KVCacheSpec
from kv_store.base import BlockRef

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def head_checksums(block: Bytes, spec: KVCacheSpec) -> tuple[int, ...]:
    """The checksum of each head of one rank's block, `[block_bytes]`, in host memory."""
    by_head = block.reshape(spec.num_layers * spec.num_planes, spec.num_kv_heads, -1)
    return tuple(
        xxhash.xxh3_64_intdigest(np.ascontiguousarray(by_head[:, head]).data) for head in range(spec.num_kv_heads)
    )


def checksum_error(ref: BlockRef, block: Bytes, spec: KVCacheSpec) -> str | None:
    """What is wrong with the bytes that came for `ref`; None if they are right, or no checksum came with it."""
    if not ref.checksums:
        return None
    num_heads = spec.num_kv_heads_in_all
    if len(ref.checksums) != num_heads:
        return f"block {ref.block_id} of peer {ref.peer!r} has {len(ref.checksums)} checksums for {num_heads} heads"
    if ref.checksums[spec.heads.start : spec.heads.stop] != head_checksums(block, spec):
        return f"block {ref.block_id} of peer {ref.peer!r} fails its checksum"
    return None
