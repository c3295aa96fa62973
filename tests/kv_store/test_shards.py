from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from common.errors import ConfigError
from common.types import KVCacheSpec
from kv_store.shards import num_readers, parts, runs, shard_of, sources_of, take_part

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
    with pytest.raises(ValueError, match="shard of a shard"):
        shard_of(shard_of(WHOLE, 1, 0, range(2)), 1, 0)


@pytest.mark.parametrize("remote_tp", [1, 3])
@pytest.mark.parametrize("local_tp", [1, 2])
@pytest.mark.parametrize("stages", [(range(3),), (range(1), range(1, 3)), (range(2), range(2, 3))])
@pytest.mark.parametrize("layers", [range(3), range(1, 3), range(1, 2)])
def test_parts_of_all_stages_make_up_each_block(
    layers: range, stages: tuple[range, ...], local_tp: int, remote_tp: int
) -> None:
    """A worker of several stages is several peers: what they hold of our layers is our block, in runs or copied."""
    whole = torch.arange(WHOLE.block_bytes // 2).to(torch.int16).view(WHOLE.block_shape)

    def block(layers: range, tp_size: int, rank: int) -> torch.Tensor:
        shard = torch.chunk(whole[layers.start : layers.stop], tp_size, dim=2)[rank]
        return shard.contiguous().view(-1).view(torch.uint8)

    for rank in range(local_tp):
        local = shard_of(WHOLE, local_tp, rank, layers)
        by_runs, copied = (torch.zeros(local.block_bytes, dtype=torch.uint8) for _ in range(2))
        num_bytes = 0
        for stage in stages:
            for part in parts(local, shard_of(WHOLE, remote_tp, 0, stage)):
                remote, source = shard_of(WHOLE, remote_tp, part.rank, stage), block(stage, remote_tp, part.rank)
                take_part(part, local, remote, source.numpy().data, copied.numpy().data)
                for run in runs(part, local, remote):
                    by_runs[run.local_offset :][: run.num_bytes] = source[run.remote_offset :][: run.num_bytes]
                    num_bytes += run.num_bytes
        assert torch.equal(by_runs, block(layers, local_tp, rank))
        assert torch.equal(copied, by_runs)
        assert num_bytes == local.block_bytes  # each byte once


def test_like_ranks_share_one_run_of_their_common_layers() -> None:
    local = shard_of(WHOLE, 2, 1, range(1, 3))
    (part,) = parts(local, shard_of(WHOLE, 2, 0))
    (run,) = runs(part, local, shard_of(WHOLE, 2, 1))
    assert (run.remote_offset, run.local_offset, run.num_bytes) == (local.layer_bytes, 0, local.block_bytes)
    assert parts(local, shard_of(WHOLE, 2, 0, range(1))) == []


def test_stores_look_for_the_same_layers_in_other_degrees() -> None:
    local = shard_of(WHOLE, 2, 1, range(1, 3))
    assert [spec for _, spec in sources_of(local, 4)] == [shard_of(WHOLE, 4, rank, range(1, 3)) for rank in (2, 3)]


@pytest.mark.parametrize("layers", [range(0), range(2, 4), range(0, 3, 2), range(-1, 2)])
def test_layers_that_are_not_there(layers: range) -> None:
    with pytest.raises(ConfigError, match=r"^layers: "):
        shard_of(WHOLE, 1, 0, layers)
