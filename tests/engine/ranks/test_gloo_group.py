"""Collectives over Gloo, between processes."""

from __future__ import annotations

import pytest
import torch

from engine.ranks.group import OneRank, RankGroup
from tests.engine.ranks.rank_processes import RankProcesses

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def values(rank: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


def reduced(group: RankGroup, dtype: torch.dtype) -> torch.Tensor:
    own = values(group.rank, dtype, 3, 5)
    group.all_reduce(own)
    return own


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_ranks_get_the_same_bits(ranks: RankProcesses, dtype: torch.dtype) -> None:
    expected = torch.zeros(3, 5)
    for rank in range(4):
        expected += values(rank, dtype, 3, 5)
    for result in ranks.run(4, reduced, dtype):
        assert result.dtype == dtype
        assert torch.equal(result, expected.to(dtype))


def gathered(group: RankGroup) -> tuple[torch.Tensor, torch.Tensor]:
    numbers = torch.arange(4).view(2, 2) + 10 * group.rank
    return group.all_gather(numbers), group.all_gather(values(group.rank, torch.bfloat16, 2, 3, 1))


def test_gathered_values_lie_in_the_order_of_ranks(ranks: RankProcesses) -> None:
    for numbers, halves in ranks.run(2, gathered):
        assert numbers.tolist() == [[0, 1, 10, 11], [2, 3, 12, 13]]
        assert torch.equal(halves, torch.cat([values(rank, torch.bfloat16, 2, 3, 1) for rank in (0, 1)], -1))


def test_one_rank_changes_nothing() -> None:
    own = values(0, torch.float32, 2, 3)
    expected = own.clone()
    OneRank().all_reduce(own)
    assert torch.equal(OneRank().all_gather(own), expected)
