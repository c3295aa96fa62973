"""Collectives of ranks on several hosts: here threads, over addresses of this machine."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from threading import Barrier, Event
from typing import TypeVar

import pytest
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from common.errors import LostRankError
from engine.hosts.group import HostGroup
from engine.ranks.dealt_experts import OfSameTokens, sends_rows
from engine.ranks.group import WHOLE_SUM_BYTES

T = TypeVar("T")

_STORE_WAIT = timedelta(seconds=30)


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, None, True, _STORE_WAIT, wait_for_workers=False)


def on_both(store: TCPStore, work: Callable[[HostGroup], T], problem: Callable[[], str] = str) -> list[T]:
    def of_rank(rank: int) -> T:
        own = store if rank == 0 else TCPStore("127.0.0.1", store.port, None, False, _STORE_WAIT)
        return work(HostGroup(own, rank, 2, "127.0.0.1", problem, timeout_s=30))

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(of_rank, range(2)))


def test_each_rank_gets_rows_of_its_own(store: TCPStore) -> None:
    counts = [[1, 2], [0, 3]]

    def work(group: HostGroup) -> list[list[list[float]]]:
        rows = torch.arange(3.0).add(10 * group.rank)[:, None]
        asked, num_from = group.all_to_all(rows, counts[group.rank])
        assert num_from == [row[group.rank] for row in counts]
        known, _ = group.all_to_all(rows, counts[group.rank], num_from)
        return [asked.tolist(), known.tolist()]

    assert on_both(store, work) == [[[[0.0]]] * 2, [[[1.0], [2.0], [10.0], [11.0], [12.0]]] * 2]


def test_experts_are_added_up_row_by_row(store: TCPStore) -> None:
    """Expert 0 is on rank 0 and doubles, expert 1 is on rank 1 and triples."""
    num_tokens = WHOLE_SUM_BYTES // 8
    x = torch.arange(4.0 * num_tokens).view(num_tokens, 4) + 8  # twice as many bytes as are added up whole
    chosen = (torch.arange(num_tokens) % 3 // 2)[:, None]
    assert sends_rows(x.nbytes, 2, 1, 2)

    def work(group: HostGroup) -> torch.Tensor:
        def compute(x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
            return x * shares * (2 + group.rank) * (chosen == group.rank)

        return OfSameTokens(group, 2)(compute, x, chosen, torch.ones(num_tokens, 1))

    for found in on_both(store, work):
        assert torch.equal(found, x * (2 + chosen))


def test_a_rank_that_does_not_come_is_named(store: TCPStore) -> None:
    both_have_met, is_lost, is_over = Barrier(2), Event(), Event()

    def work(group: HostGroup) -> str:
        both_have_met.wait(60)
        if group.rank == 1:
            is_over.wait(60)
            return ""
        is_lost.set()
        try:
            with pytest.raises(LostRankError) as caught:
                group.all_to_all(torch.zeros(2, 1), [1, 1], [1, 1])
        finally:
            is_over.set()
        return caught.value.message

    found = on_both(store, work, lambda: "rank 1 has ended" if is_lost.is_set() else "")
    assert found == ["rank 1 has ended", ""]
