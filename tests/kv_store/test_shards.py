from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from common.errors import ConfigError
from common.types import KVCacheSpec
from kv_store.shards import num_readers, parts, runs, shard_of

WHOLE = KVCacheSpec(model_id="m", num_layers=3, num_kv_heads=12, head_dim=2, block_size=2, dtype="bfloat16")
DEGREES = (1, 2, 3, 4, 6, 12)


@pytest.mark.parametrize("remote_tp", DEGREES)
@pytest.mark.parametrize("local_tp", DEGREES)
def test_runs_make_up_each_block(local_tp: int, remote_tp: int) -> None:
    """Against slices of a whole block whose elements are all different."""
    whole = torch.arange(WHOLE.block_bytes // 2).to(torch.int16).view(WHOLE.block_shape)

    def block(tp_size: int, rank: int) -> torch.Tensor:
        return torch.chunk(whole, tp_size, dim=2)[rank].contiguous().view(-1).view(torch.uint8)

    for rank in range(local_tp):
        local = shard_of(WHOLE, local_tp, rank)
        block_bytes = torch.zeros(local.block_bytes, dtype=torch.uint8)
        num_bytes = 0
        for part in parts(local, shard_of(WHOLE, remote_tp, 0)):
            source = block(remote_tp, part.rank)
            for run in runs(part, local, shard_of(WHOLE, remote_tp, 0)):
                block_bytes[run.local_offset :][: run.num_bytes] = source[run.remote_offset :][: run.num_bytes]
                num_bytes += run.num_bytes
        assert torch.equal(block_bytes, block(local_tp, rank))
        assert num_bytes == local.block_bytes  # each byte once


def test_blocks_of_one_plane_have_half_the_runs() -> None:
    whole = replace(WHOLE, num_planes=1)
    local = shard_of(whole, 2, 1)
    assert local.block_bytes * 2 == shard_of(WHOLE, 2, 1).block_bytes
    assert [len(runs(part, local, whole)) for part in parts(local, whole)] == [3]


def test_like_ranks_share_one_run() -> None:
    local = shard_of(WHOLE, 4, 2)
    (part,) = parts(local, shard_of(WHOLE, 4, 0))
    (run,) = runs(part, local, local)
    assert (part.rank, run.remote_offset, run.local_offset, run.num_bytes) == (2, 0, 0, local.block_bytes)


def test_unlike_ranks_share_one_run_per_layer_and_kind() -> None:
    local = shard_of(WHOLE, 2, 1)
    assert [len(runs(part, local, WHOLE)) for part in parts(local, WHOLE)] == [6]
    assert [part.rank for part in parts(local, shard_of(WHOLE, 4, 0))] == [2, 3]


@pytest.mark.parametrize(("ours", "theirs", "expected"), [(1, 1, 1), (1, 4, 4), (2, 4, 2), (4, 2, 1), (4, 1, 1)])
def test_how_many_ranks_read_of_one(ours: int, theirs: int, expected: int) -> None:
    assert num_readers(shard_of(WHOLE, ours, 0), theirs) == expected


@pytest.mark.parametrize(("tp_size", "tp_rank", "field"), [(5, 0, "tp_size"), (24, 0, "tp_size"), (2, 2, "tp_rank")])
def test_shards_that_cannot_be(tp_size: int, tp_rank: int, field: str) -> None:
    """More ranks than heads included: a head on several ranks is refused."""
    with pytest.raises(ConfigError, match=f"^{field}: "):
        shard_of(WHOLE, tp_size, tp_rank)
    with pytest.raises(ValueError, match="shard of a shard"):
        shard_of(replace(WHOLE, tp_size=2), 2, 0)
