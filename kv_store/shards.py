"""Where one shard's part of a KV block lies in the blocks of workers that are divided otherwise. Knows no store.

A whole block is `[num_layers, num_planes, heads, block_size, head_dim]`. A shard has a range of its layers (one stage
of pipeline parallelism) and a range of its heads (one rank of tensor parallelism), as a block of its own: rank r of a
worker of degree n holds the heads `[r * heads/n, (r+1) * heads/n)` of each of its layers, K and V. So what two shards
have in common is, in each row (layer and plane) that both have, one run of neighbouring heads:

    degree 2, rank 1      K of layer 0: . . 2 3    V: . . 2 3    K of layer 1: . . 2 3 …     (heads 0 to 3)
    degree 4, rank 2                        2           2                          2   …

Both may hold the same heads: then the runs meet, and all layers that both have are one run.
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
class CommonPart:
    """The layers and heads that our shard has in common with rank `rank` of another worker."""

    rank: int
    remote_head: int  # the first head, as that rank counts its own
    local_head: int  # and as our shard counts its own
    num_heads: int
    remote_layer: int  # likewise for the layers
    local_layer: int
    num_layers: int

    def in_remote(self, remote: KVCacheSpec) -> tuple[slice, slice]:
        """The part's rows and heads in the other rank's block, `[num_layers * num_planes, num_kv_heads, ...]`."""
        return _slices(self.remote_layer, self.num_layers, remote, self.remote_head, self.num_heads)

    def in_local(self, local: KVCacheSpec) -> tuple[slice, slice]:
        """The same in our shard's block."""
        return _slices(self.local_layer, self.num_layers, local, self.local_head, self.num_heads)


def _slices(layer: int, num_layers: int, spec: KVCacheSpec, head: int, num_heads: int) -> tuple[slice, slice]:
    rows = slice(layer * spec.num_planes, (layer + num_layers) * spec.num_planes)
    return rows, slice(head, head + num_heads)


def shard_of(whole: KVCacheSpec, tp_size: int, tp_rank: int, layers: range | None = None) -> KVCacheSpec:
    """The blocks of one shard, `whole` being those of a worker of degree 1 with all layers. `layers`: of the shard, as
    `whole` counts them; None: all.

    Raises `ConfigError` if the heads can't be dealt out evenly, or if `whole` lacks some of the layers. Giving one head
    to several ranks is not supported.
    """
    if whole.tp_size != 1 or whole.num_layers != whole.num_layers_in_all:
        raise ValueError(f"a shard of a shard: {whole}")
    if tp_size < 1 or whole.num_kv_heads % tp_size:
        raise ConfigError("tp_size", f"{tp_size} does not divide the model's {whole.num_kv_heads} KV heads")
    if not 0 <= tp_rank < tp_size:
        raise ConfigError("tp_rank", f"{tp_rank} is not a rank of {tp_size}")
    shard = replace(whole, num_kv_heads=whole.num_kv_heads // tp_size, tp_size=tp_size, tp_rank=tp_rank)
    if layers is None or layers == whole.layers:
        return shard
    if not layers or layers.step != 1 or layers.start < 0 or layers.stop > whole.num_layers:
        raise ConfigError("layers", f"{layers.start} to {layers.stop - 1} are no layers of {whole.num_layers}")
    return replace(shard, num_layers=len(layers), first_layer=layers.start, num_layers_of_whole=whole.num_layers_in_all)


def parts(local: KVCacheSpec, remote: KVCacheSpec) -> list[CommonPart]:
    """The parts of our blocks that each rank of the other worker holds, as far as that worker has our layers: all
    together, the parts are our whole blocks if it has all of our layers. Empty if it has none.

    `remote` may be the spec of any of its ranks. The two are of one whole: same layers and heads in all, block size.
    """
    first_layer = max(local.first_layer, remote.first_layer)
    num_layers = min(local.layers.stop, remote.layers.stop) - first_layer
    if num_layers <= 0:
        return []
    first, end, size = local.heads.start, local.heads.stop, remote.num_kv_heads
    found: list[CommonPart] = []
    for rank in range(first // size, -(-end // size)):
        begin, stop = max(first, rank * size), min(end, (rank + 1) * size)
        found.append(
            CommonPart(
                rank,
                remote_head=begin - rank * size,
                local_head=begin - first,
                num_heads=stop - begin,
                remote_layer=first_layer - remote.first_layer,
                local_layer=first_layer - local.first_layer,
                num_layers=num_layers,
            )
        )
    return found


def degrees(spec: KVCacheSpec) -> list[int]:
    """All tensor-parallel degrees among whose ranks the model's heads can be dealt out evenly."""
    num_heads = spec.num_kv_heads_in_all
    return [tp_size for tp_size in range(1, num_heads + 1) if num_heads % tp_size == 0]


def sources_of(spec: KVCacheSpec, tp_size: int) -> list[tuple[CommonPart, KVCacheSpec]]:
    """The ranks of a worker of degree `tp_size`, with the same layers, that hold heads of our blocks: which ones, and
    that rank's spec."""
    return [(part, _of_degree(spec, tp_size, part.rank)) for part in parts(spec, _of_degree(spec, tp_size, 0))]


def num_readers(local: KVCacheSpec, tp_size: int) -> int:
    """How many ranks of a worker of degree `tp_size` hold heads of our blocks."""
    return len(parts(local, _of_degree(local, tp_size, 0)))


def _of_degree(spec: KVCacheSpec, tp_size: int, tp_rank: int) -> KVCacheSpec:
    """The shard of another degree with the same layers."""
    return replace(spec, num_kv_heads=spec.num_kv_heads_in_all // tp_size, tp_size=tp_size, tp_rank=tp_rank)


def take_part(part: CommonPart, local: KVCacheSpec, remote: KVCacheSpec, block: memoryview, into: memoryview) -> None:
    """Copies `part` from one whole block of the remote rank into ours."""
    ours, theirs = (
        np.frombuffer(data, np.uint8).reshape(spec.num_layers * spec.num_planes, spec.num_kv_heads, -1)
        for data, spec in ((into, local), (block, remote))
    )
    ours[part.in_local(local)] = theirs[part.in_remote(remote)]


def runs(part: CommonPart, local: KVCacheSpec, remote: KVCacheSpec) -> list[Run]:
    """The bytes of `part` in one block of each side, in order, as few runs as there can be."""
    head_bytes = local.head_bytes
    found: list[Run] = []
    for row in range(part.num_layers * local.num_planes):
        remote_row, local_row = part.remote_layer * local.num_planes + row, part.local_layer * local.num_planes + row
        run = Run(
            (remote_row * remote.num_kv_heads + part.remote_head) * head_bytes,
            (local_row * local.num_kv_heads + part.local_head) * head_bytes,
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
