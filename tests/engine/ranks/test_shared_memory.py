from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from common.errors import LostRankError
from engine.ranks.alive import STOPPED_S, RankWatch
from engine.ranks.shared_memory import SLOT_BYTES, SharedMemoryGroup, exchange_library
from tests.engine.ranks.groups import on_all

pytestmark = pytest.mark.skipif(exchange_library() is None, reason="the library was not built")

LONGER_THAN_A_SLOT = SLOT_BYTES // 4 + 5


def values_of(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(shape, generator=generator).mul(10.0**rank).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(4, marks=pytest.mark.slow)])
def test_sums_are_added_in_the_order_of_ranks(size: int, dtype: torch.dtype) -> None:
    shapes = [(1,), (3, 7), (2048,), (100, 119), (LONGER_THAN_A_SLOT,), (0, 4)]

    def work(group: SharedMemoryGroup) -> list[torch.Tensor]:
        sums = [values_of(group.rank, shape, dtype) for shape in shapes for _ in range(3)]
        for one in sums:
            group.all_reduce(one)
        return sums

    found = on_all(size, work)
    for place, shape in enumerate(shape for shape in shapes for _ in range(3)):
        total = values_of(0, shape, dtype).float()
        for rank in range(1, size):
            total += values_of(rank, shape, dtype).float()
        for sums in found:
            assert torch.equal(sums[place], total.to(dtype))


def test_values_that_do_not_lie_together_are_summed_too() -> None:
    def work(group: SharedMemoryGroup) -> torch.Tensor:
        values = torch.arange(12.0).view(3, 4).mul(group.rank + 1).t()
        group.all_reduce(values)
        return values

    for values in on_all(2, work):
        assert torch.equal(values, torch.arange(12.0).view(3, 4).mul(3).t())


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_rows_of_all_ranks_are_joined(size: int) -> None:
    cases = [((5,), torch.int64), ((3, 7), torch.float32), ((2, 3, 9), torch.bfloat16), ((0, 3), torch.float32)]
    cases += [((2, LONGER_THAN_A_SLOT), torch.float32), ((700, 1000), torch.bfloat16), ((2, 0), torch.float32)]

    def work(group: SharedMemoryGroup) -> list[torch.Tensor]:
        return [group.all_gather(values_of(group.rank, *case)) for case in cases]

    found = on_all(size, work)
    for place, case in enumerate(cases):
        expected = torch.cat([values_of(rank, *case) for rank in range(size)], dim=-1)
        for joined in found:
            assert joined[place].is_contiguous()
            assert torch.equal(joined[place], expected)


def test_a_rank_that_will_never_come_is_named() -> None:
    def work(group: SharedMemoryGroup) -> str:
        if group.rank == 1:
            return ""
        with pytest.raises(LostRankError) as caught:
            group.all_reduce(torch.ones(1))
        return caught.value.message

    assert on_all(2, work, lambda rank: f"rank {rank} has ended") == ["rank 1 has ended", ""]


def test_a_rank_that_fails_holds_up_nobody() -> None:
    def work(group: SharedMemoryGroup) -> str:
        if group.rank == 1:
            time.sleep(0.05)  # others sleep by then
            group.fail()
            return ""
        with pytest.raises(LostRankError) as caught:
            group.all_gather(torch.ones(1))
        return caught.value.message

    assert on_all(3, work) == ["rank 1 has failed", "", "rank 1 has failed"]


def test_a_slow_rank_is_waited_for() -> None:
    def work(group: SharedMemoryGroup) -> float:
        if group.rank == 1:
            time.sleep(0.25)  # longer than others sleep between two looks
        values = torch.ones(1)
        group.all_reduce(values)
        return values.item()

    assert on_all(2, work) == [2.0, 2.0]


def test_processes_that_end_or_stand_still_are_found() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    now = [0.0]
    watch = RankWatch([os.getpid(), child.pid], lambda: now[0])

    def look(seconds_later: float = 0.0) -> str:
        now[0] += seconds_later
        return watch.problem(1)

    name = f"rank 1 (process {child.pid})"
    try:
        assert watch.problem(0) == look() == ""
        child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED)
        assert look() == ""
        assert look(10.0) == ""  # this process may have stood still itself
        assert look(STOPPED_S) == f"{name} was stopped by a signal"
        child.send_signal(signal.SIGCONT)
        os.waitid(os.P_PID, child.pid, os.WCONTINUED)
        assert look() == ""
    finally:
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert look() == f"{name} has ended"  # although nobody has waited for it
        child.communicate()
    assert look() == f"{name} has ended"


def test_the_state_is_read_behind_any_name(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "stat").write_text("7 (a) Z (b) S 1 7 7 0")
    assert RankWatch([7], proc=tmp_path).problem(0) == ""
