"""Rows of their own for each rank: in shared memory between threads, over Gloo between processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import pytest
import torch

from common.errors import InternalError
from engine.ranks.group import OneRank, RankGroup
from engine.ranks.shared_memory import SLOT_BYTES, SharedMemoryGroup, exchange_library
from tests.engine.ranks.groups import on_all
from tests.engine.ranks.rank_processes import RankProcesses

needs_library = pytest.mark.skipif(exchange_library() is None, reason="the library was not built")

Counts: TypeAlias = list[list[int]]  # rows by who sends and who receives
WIDTH = 5
SLOT_ROWS = SLOT_BYTES // (4 * WIDTH) + 1  # float32, more than one slot has
CASES: list[tuple[Counts, torch.dtype]] = [
    ([[1, 2, 3], [4, 0, 1], [2, 2, 2]], torch.float32),
    ([[0, 2, 0], [0, 0, 0], [7, 0, 9]], torch.bfloat16),
    ([[0, 0, 0], [0, 0, 0], [0, 0, 0]], torch.float32),
    ([[3, 0, 0], [0, 4, 0], [0, 0, 5]], torch.uint8),  # nothing travels
    ([[2, SLOT_ROWS, 1], [1, 3, SLOT_ROWS], [5, 0, 1]], torch.float32),  # as many as pass through a slot in two pieces
    ([[0, 0, 0], [3 * SLOT_ROWS, 0, 2], [0, 0, 0]], torch.float32),  # one rank has much, the others nothing
]


def rows_of(counts: Counts, sender: int, receiver: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * sender + receiver)
    return torch.randint(0, 100, (counts[sender][receiver], WIDTH), generator=generator).to(dtype)


def exchanged(group: RankGroup) -> list[tuple[torch.Tensor, list[int]]]:
    """All cases, each without and with what is known of it; between them sums, which take turns, too."""
    found = []
    for counts, dtype in CASES:
        own = torch.cat([rows_of(counts, group.rank, to, dtype) for to in range(group.size)])
        found.append(group.all_to_all(own, counts[group.rank]))
        ones = torch.ones(3)
        group.all_reduce(ones)
        assert ones.tolist() == [group.size] * 3
        found.append(group.all_to_all(own, counts[group.rank], [row[group.rank] for row in counts]))
    return found


def check(by_rank: list[list[tuple[torch.Tensor, list[int]]]]) -> None:
    for rank, found in enumerate(by_rank):
        for (came, num_from), (counts, dtype) in zip(found, (case for case in CASES for _ in range(2)), strict=True):
            expected = torch.cat([rows_of(counts, sender, rank, dtype) for sender in range(3)])
            assert came.dtype == dtype
            assert came.is_contiguous()
            assert torch.equal(came, expected)
            assert num_from == [row[rank] for row in counts]


@needs_library
def test_in_shared_memory() -> None:
    check(on_all(3, exchanged))


def test_over_gloo(ranks: RankProcesses) -> None:
    check(ranks.run(3, exchanged))


@needs_library
def test_rows_that_do_not_lie_together_are_sent_too() -> None:
    def work(group: SharedMemoryGroup) -> torch.Tensor:
        rows = torch.arange(8.0).view(2, 4).add(10 * group.rank).T[:, :1]  # one apart from another
        return group.all_to_all(rows, [1, 3])[0]

    first, second = on_all(2, work)
    assert first.flatten().tolist() == [0, 10]
    assert second.flatten().tolist() == [1, 2, 3, 11, 12, 13]


@needs_library
def test_ranks_that_send_other_numbers_than_this_one_knows_are_found() -> None:
    def work(group: SharedMemoryGroup) -> str:
        with pytest.raises(InternalError) as caught:
            group.all_to_all(torch.zeros(2, 1), [1, 1], [1, 2])
        return caught.value.message

    assert on_all(2, work) == ["[1, 1] rows came from the ranks, not [1, 2]"] * 2


def test_one_rank_sends_itself_all() -> None:
    rows = torch.arange(6).view(3, 2)
    came, num_from = OneRank().all_to_all(rows, [3])
    assert torch.equal(came, rows)
    assert num_from == [3]


def summed(group: RankGroup, make: Callable[[int], torch.Tensor]) -> torch.Tensor:
    values = make(group.rank)
    group.all_reduce(values)
    return values


def many(rank: int) -> torch.Tensor:
    """More than each rank adds up whole, and not as many as the ranks can share evenly."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn((131, 127), generator=generator).mul(10.0**rank).bfloat16()


@pytest.mark.parametrize("size", [3, 4])
def test_many_values_are_added_up_in_parts(ranks: RankProcesses, size: int) -> None:
    total = torch.zeros(131, 127)
    for rank in range(size):
        total += many(rank)
    for found in ranks.run(size, summed, many):
        assert torch.equal(found, total.bfloat16())
