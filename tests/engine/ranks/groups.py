"""Ranks of one model as threads of one process: what they compute with lets go of Python's lock while it waits."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from engine.ranks.shared_memory import SharedMemoryGroup, make_segment

T = TypeVar("T")


def nobody_is_lost(_rank: int) -> str:
    return ""


def on_all(
    size: int, work: Callable[[SharedMemoryGroup], T], problem: Callable[[int], str] = nobody_is_lost
) -> list[T]:
    """What `work` gives on each rank. Raises what the first rank that failed raised."""
    segment = make_segment(size)
    groups = [SharedMemoryGroup(segment, rank, size, problem, has_core=size == 2) for rank in range(size)]
    os.close(segment)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(work, groups))
