"""Where one tensor-parallel rank's part of a KV block lies in the blocks of workers of another degree. Knows no store.

A whole block is `[num_layers, num_planes, heads, block_size, head_dim]`. Rank r of a worker of degree n holds the heads
`[r * heads/n, (r+1) * heads/n)` of every layer, K and V, as a block of its own. So what two ranks have in common is,
in each of the `num_layers * num_planes` rows, one run of neighbouring heads:

    degree 2, rank 1      K of layer 0: . . 2 3    V: . . 2 3    K of layer 1: . . 2 3 …     (heads 0 to 3)
    degree 4, rank 2                        2           2                          2   …

Both may hold the same heads: then the runs meet, and the whole block is one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from common.errors import ConfigError
from common.types import KVCacheSpec


@dataclass(slots=True, frozen=True)
class Run:
    """Neighbouring bytes of one block that are neighbours in the other as well. Offsets from the start of the block."""

    remote_offset: int
    local_offset: int
    num_bytes: int


@dataclass(slots=True, frozen=True)
class Part:
    """The heads that our rank has in common with rank `rank` of another worker."""

    rank: int
    remote_head: int  # the first of them, as that rank counts its own
    local_head: int  # and as we count ours
    num_heads: int


def shard_of(whole: KVCacheSpec, tp_size: int, tp_rank: int) -> KVCacheSpec:
    """The blocks of one rank, `whole` being those of a worker of degree 1.

    Raises `ConfigError` if the heads can't be dealt out evenly. Giving one head to several ranks is not supported.
    """
    if whole.tp_size != 1:
        raise ValueError(f"a shard of a shard: {whole}")
    if tp_size < 1 or whole.num_kv_heads % tp_size:
        raise ConfigError("tp_size", f"{tp_size} does not divide the model's {whole.num_kv_heads} KV heads")
    if not 0 <= tp_rank < tp_size:
        raise ConfigError("tp_rank", f"{tp_rank} is not a rank of {tp_size}")
    return replace(whole, num_kv_heads=whole.num_kv_heads // tp_size, tp_size=tp_size, tp_rank=tp_rank)


def parts(local: KVCacheSpec, remote: KVCacheSpec) -> list[Part]:
    """The parts of our blocks that each rank of the other worker holds. Together the parts are our whole blocks.

    `remote` may be the spec of any of its ranks. The two are of one whole: same layers, heads in all, block size.
    """
    first, end = local.tp_rank * local.num_kv_heads, (local.tp_rank + 1) * local.num_kv_heads
    size = remote.num_kv_heads
    found: list[Part] = []
    for rank in range(first // size, -(-end // size)):
        begin, stop = max(first, rank * size), min(end, (rank + 1) * size)
        found.append(Part(rank, begin - rank * size, begin - first, stop - begin))
    return found


def degrees(spec: KVCacheSpec) -> list[int]:
    """All tensor-parallel degrees among whose ranks the model's heads can be dealt out evenly."""
    num_heads = spec.num_kv_heads * spec.tp_size
    return [tp_size for tp_size in range(1, num_heads + 1) if num_heads % tp_size == 0]


def sources_of(spec: KVCacheSpec, tp_size: int) -> list[tuple[Part, KVCacheSpec]]:
    """The ranks of a worker of degree `tp_size` that hold heads of our blocks: which ones, and that rank's spec."""
    whole = replace(spec, num_kv_heads=spec.num_kv_heads * spec.tp_size, tp_size=1, tp_rank=0)
    return [(part, shard_of(whole, tp_size, part.rank)) for part in parts(spec, shard_of(whole, tp_size, 0))]


def take_heads(part: Part, local: KVCacheSpec, remote: KVCacheSpec, block: memoryview, into: memoryview) -> None:
    """Copies the heads of `part` from one whole block of the remote rank into ours."""
    num_rows = local.num_layers * local.num_planes
    ours = np.frombuffer(into, np.uint8).reshape(num_rows, local.num_kv_heads, -1)
    theirs = np.frombuffer(block, np.uint8).reshape(num_rows, remote.num_kv_heads, -1)
    ours[:, part.local_head : part.local_head + part.num_heads] = theirs[
        :, part.remote_head : part.remote_head + part.num_heads
    ]


def runs(part: Part, local: KVCacheSpec, remote: KVCacheSpec) -> list[Run]:
    """The bytes of `part` in one block of each side, in order, as few runs as there can be."""
    head_bytes = local.head_bytes
    found: list[Run] = []
    for row in range(local.num_layers * local.num_planes):
        run = Run(
            (row * remote.num_kv_heads + part.remote_head) * head_bytes,
            (row * local.num_kv_heads + part.local_head) * head_bytes,
            part.num_heads * head_bytes,
        )
        last = found[-1] if found else None
        if last is not None and (
            last.remote_offset + last.num_bytes == run.remote_offset
            and last.local_offset + last.num_bytes == run.local_offset
        ):
            found[-1] = replace(last, num_bytes=last.num_bytes + run.num_bytes)
        else:
            found.append(run)
    return found


def num_readers(local: KVCacheSpec, tp_size: int) -> int:
    """How many ranks of a worker of degree `tp_size` hold heads of our blocks."""
    num_heads = local.num_kv_heads * local.tp_size
    other = replace(local, num_kv_heads=num_heads // tp_size, tp_size=tp_size, tp_rank=0)
    return len(parts(local, other))
