"""Experts that are dealt out: sums have the bits of an all-reduce, and only rows that were asked for travel."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from engine.ranks.dealt_experts import OfOwnTokens, OfSameTokens, asked_ranks, sends_rows, share_of_ranks, stops_of
from engine.ranks.group import WHOLE_SUM_BYTES, RankGroup
from engine.ranks.shared_memory import exchange_library
from tests.engine.ranks.groups import on_all
from tests.engine.ranks.rank_processes import CountingGroup, RankProcesses

NUM_EXPERTS, PER_TOKEN, WIDTH = 16, 2, 66  # 4 ranks: a token's experts are on 1.8 of them in the mean
NOBODY = NUM_EXPERTS  # a number that no expert has: some routers give it


def tokens(seed: int, count: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn((count, WIDTH), generator=generator).to(dtype)
    chosen = torch.rand((count, NUM_EXPERTS), generator=generator).argsort(1)[:, :PER_TOKEN].clone()
    chosen[5::7, 1] = NOBODY
    return x, chosen, torch.rand((count, PER_TOKEN), generator=generator)


class SomeExperts:
    """Expert number e adds `x` times e + 1; a rank has some of them."""

    def __init__(self, rank: int, size: int) -> None:
        stops = [0, *stops_of(NUM_EXPERTS, size).tolist()]
        self._own = range(stops[rank], stops[rank + 1])
        self.num_tokens = 0

    def __call__(self, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        self.num_tokens = len(x)
        given = torch.zeros_like(x)
        for number in self._own:
            at = chosen == number
            given += ((x.float() * (number + 1) * (shares * at).sum(1, keepdim=True)).to(x.dtype)) * at.any(1)[:, None]
        return given


def reduced(group: RankGroup, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """The same by a sum of all rows of all ranks."""
    given = SomeExperts(group.rank, group.size)(x, chosen, shares)
    group.all_reduce(given)
    return given


def num_asked(chosen: torch.Tensor, size: int, but_for: int) -> int:
    """How many rows go to other ranks, counted one by one."""
    stops = stops_of(NUM_EXPERTS, size).tolist()
    ranks = [{sum(stop <= expert for stop in stops) for expert in row if expert != NOBODY} for row in chosen.tolist()]
    return sum(len(each - {but_for}) for each in ranks)


def of_own_tokens(group: RankGroup, counts: list[int], dtype: torch.dtype) -> tuple[bool, int, int]:
    everybody = [tokens(rank, count, dtype) for rank, count in enumerate(counts)]
    own = everybody[group.rank]
    counting, experts = CountingGroup(group), SomeExperts(group.rank, group.size)
    given = OfOwnTokens(counting, NUM_EXPERTS)(experts, *own)
    expected = reduced(group, *(torch.cat(parts) for parts in zip(*everybody, strict=True)))
    start = sum(counts[: group.rank])
    (there, sent, sent_dtype), (back, returned, back_dtype) = counting.asked
    assert (there, back) == ("all_to_all", "all_to_all")
    assert sent[0] == num_asked(own[1], group.size, group.rank)
    assert (sent[1], sent_dtype) == (8 * PER_TOKEN + math.ceil(WIDTH * dtype.itemsize / 4) * 4, torch.uint8)
    assert (returned[1], back_dtype) == (WIDTH, dtype)
    return torch.equal(given, expected[start : start + counts[group.rank]]), sent[0], returned[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", [[30, 50], [40, 0, 7, 23], [0, 0, 0, 1], [0, 0, 0, 0]])
def test_tokens_travel_to_the_ranks_whose_experts_they_chose(
    ranks: RankProcesses, counts: list[int], dtype: torch.dtype
) -> None:
    found = ranks.run(len(counts), of_own_tokens, counts, dtype)
    assert all(is_equal for is_equal, _, _ in found)
    num_sent = sum(sent for _, sent, _ in found)
    assert num_sent == sum(returned for _, _, returned in found)  # a row comes back for each
    assert num_sent <= sum(counts) * min(PER_TOKEN, len(counts) - 1)


def of_same_tokens(group: RankGroup, count: int, dtype: torch.dtype) -> tuple[bool, list[tuple[str, tuple[int, ...]]]]:
    own = tokens(1, count, dtype)
    counting = CountingGroup(group)
    given = OfSameTokens(counting, NUM_EXPERTS)(SomeExperts(group.rank, group.size), *own)
    return torch.equal(given, reduced(group, *own)), [(name, shape) for name, shape, _ in counting.asked]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_of_the_same_tokens_only_rows_that_were_asked_for_are_added_up(
    ranks: RankProcesses, dtype: torch.dtype
) -> None:
    count = WHOLE_SUM_BYTES // (WIDTH * dtype.itemsize) + 2
    asked = asked_ranks(tokens(1, count, dtype)[1], stops_of(NUM_EXPERTS, 4), 4)
    each = -(-count // 4)
    for rank, (is_equal, collectives) in enumerate(ranks.run(4, of_same_tokens, count, dtype)):
        assert is_equal
        for_others = int(asked[:, rank].sum() - asked[rank * each : (rank + 1) * each, rank].sum())
        assert collectives == [("all_to_all", (for_others, WIDTH)), ("all_gather", (each * WIDTH,))]


def test_few_bytes_are_one_exchange(ranks: RankProcesses) -> None:
    for is_equal, collectives in ranks.run(4, of_same_tokens, 9, torch.float32):
        assert is_equal
        assert collectives == [("all_reduce", (9, WIDTH))]


@pytest.mark.skipif(exchange_library() is None, reason="the library was not built")
def test_in_shared_memory_all_is_added_up() -> None:
    count = WHOLE_SUM_BYTES // (WIDTH * 4) + 2
    for is_equal, collectives in on_all(4, partial(of_same_tokens, count=count, dtype=torch.float32)):
        assert is_equal
        assert collectives == [("all_reduce", (count, WIDTH))]


def test_ranks_that_a_token_asks() -> None:
    stops = stops_of(5, 2)
    assert stops.tolist() == [2, 5]
    chosen = torch.tensor([[0, 1], [4, 1], [2, 5], [5, 5]])  # 5: no expert
    assert asked_ranks(chosen, stops, 2).tolist() == [[True, False], [True, True], [False, True], [False, False]]


def test_the_rule() -> None:
    assert share_of_ranks(8, 1, 2) == pytest.approx(1 / 2)
    assert share_of_ranks(8, 2, 2) == pytest.approx(1 - 6 / 28)  # both on the other rank
    assert share_of_ranks(5, 1, 2) == pytest.approx(1 / 2)  # 2 and 3 experts
    assert share_of_ranks(8, 8, 4) == 1
    many, few = WHOLE_SUM_BYTES + 1, WHOLE_SUM_BYTES
    assert sends_rows(many, 256, 8, 16)
    assert not sends_rows(few, 256, 8, 16)
    assert not sends_rows(many, 256, 8, 8)  # a token asks 5 of 8 ranks
    assert sends_rows(many, 16, 1, 2)
    assert not sends_rows(many, 8, 2, 2)
