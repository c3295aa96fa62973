"""Which rows of a step begin with the same blocks, so that attention may read those blocks once for all of them.

    row A | 4 9 2 | 7 1        4 9 2: shared by A and C, read once
    row B | 5 3 8 6            7 1 and 3: each row's own
    row C | 4 9 2 | 3          B shares nothing

Rows share blocks after hits in the prefix cache (a common system prompt), if one prompt has several answers, and if
several drafted tokens of one request are checked. Only blocks that were full before the step count: a later one is
being written, and a row always keeps its newest token to itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from engine.attention.step_tables import Int32s, StepTables

MAX_GROUPS = 8  # of rows that share; further ones are read row by row


@dataclass(frozen=True)
class SharedPrefixes:
    order: Int32s  # the rows that were given: those that share come first, group by group
    offsets: Int32s  # where each group begins in `order` and where the last one ends, `[num_groups + 1]`
    num_blocks: Int32s  # leading blocks that each group shares, `[num_groups]`
    block_ids: Int32s  # those blocks, group by group

    @property
    def num_groups(self) -> int:
        return len(self.num_blocks)

    @property
    def num_sharing(self) -> int:
        """The first so many of `order` are in a group."""
        return int(self.offsets[-1])

    @cached_property
    def num_skipped(self) -> Int32s:
        """For each row of `order` the leading blocks that its group reads for it."""
        skipped = np.zeros(len(self.order), np.int32)
        skipped[: self.num_sharing] = np.repeat(self.num_blocks, np.diff(self.offsets))
        return skipped


def shared_prefixes(
    tables: StepTables, rows: Int32s, *, min_tokens: int, max_groups: int = MAX_GROUPS
) -> SharedPrefixes | None:
    """Groups of the single-token `rows`; None if reading shared blocks once saves fewer than `min_tokens` tokens of KV.

    One group after the other is the one that saves most of what is left. That need not be the best choice of several
    groups, but a row that shares little never spoils a group that shares much.
    """
    size = tables.block_size
    num_full = tables.num_before[rows] // size
    first_ids = tables.tables[tables.starts[rows]]
    _, kinds, counts = np.unique(first_ids, return_inverse=True, return_counts=True)
    places = np.flatnonzero((counts[kinds] > 1) & (num_full > 0))
    num_full = num_full[places]
    if int(num_full.sum()) * size < min_tokens or len(places) < 2:
        return None
    # Blocks by row, in an order in which rows that begin alike are neighbours. Behind the full blocks of a row stands
    # a number that no other row has. No two rows share more blocks than the second longest has.
    width = int(np.partition(num_full, -2)[-2])
    index = np.arange(width, dtype=np.int32)
    starts = tables.starts[rows[places]][:, None]
    is_full = index < num_full[:, None]
    none = np.arange(-len(places), 0, dtype=np.int32)[:, None]
    ids = np.where(is_full, tables.tables[starts + np.where(is_full, index, 0)], none)
    keys = [row.tobytes() for row in ids]
    by_table = np.array(sorted(range(len(places)), key=keys.__getitem__))
    ids, places = ids[by_table], places[by_table]
    differs = ids[1:] != ids[:-1]
    in_common = np.where(differs.any(1), differs.argmax(1), width).tolist()
    groups: list[tuple[list[int], int]] = []  # indices of `places`, and how many blocks they share
    left, num_saved = list(range(len(places))), 0
    while len(groups) < max_groups and len(left) > 1:
        start, stop, height = _largest(in_common)
        saved = (stop - start - 1) * height * size
        if saved * max_groups < min_tokens or not saved:
            break
        num_saved += saved
        groups.append((left[start:stop], height))
        # What is in common of the rows before and behind the group, which are neighbours now.
        across = [min(in_common[start - 1 : stop])] if start and stop < len(left) else []
        in_common[max(start - 1, 0) : stop] = across
        left[start:stop] = []
    if not groups or num_saved < min_tokens:
        return None
    sharing = places[[index for members, _ in groups for index in members]]
    others = np.ones(len(rows), bool)
    others[sharing] = False
    return SharedPrefixes(
        order=rows[np.concatenate((sharing, np.flatnonzero(others)))],
        offsets=np.cumsum([0, *(len(members) for members, _ in groups)], dtype=np.int32),
        num_blocks=np.array([height for _, height in groups], np.int32),
        block_ids=np.concatenate([ids[members[0], :height] for members, height in groups]),
    )


def _largest(heights: list[int]) -> tuple[int, int, int]:
    """`heights`: what each row has in common with the next one. The neighbours `[start, stop)` for which
    `(stop - start - 1) * height` is largest, and their height: the largest rectangle under a histogram, found in one
    pass with a stack of rising heights."""
    best, found = -1, (0, 0, 0)
    rising: list[tuple[int, int]] = []  # where a rectangle of this height may begin, and the height
    for stop, height in enumerate([*heights, -1]):
        start = stop
        while rising and rising[-1][1] >= height:
            start, tall = rising.pop()
            if (stop - start) * tall > best:
                best, found = (stop - start) * tall, (start, stop + 1, tall)
        rising.append((start, height))
    return found
