"""Which rows share how many blocks, against what loops over lists say."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention.shared_prefixes import SharedPrefixes, _largest, shared_prefixes
from engine.attention.step_tables import StepTables
from engine.step import StepRow
from tests.examples import examples

SIZE = 4


def find(rows: list[tuple[list[int], int]], **options: int) -> SharedPrefixes | None:
    """`rows`: block table, and number of tokens before the new one."""
    steps = [StepRow(token_ids=[0], num_computed_tokens=before, block_ids=table) for table, before in rows]
    given = {"min_tokens": 1, **options}
    return shared_prefixes(StepTables(steps, SIZE), np.arange(len(rows), dtype=np.int32), **given)


def groups_of(found: SharedPrefixes | None) -> list[tuple[set[int], list[int]]]:
    """The rows of each group, and the blocks that they share."""
    if found is None:
        return []
    groups, start = [], 0
    for index, count in enumerate(found.num_blocks.tolist()):
        members = found.order[found.offsets[index] : found.offsets[index + 1]]
        groups.append((set(members.tolist()), found.block_ids[start : start + count].tolist()))
        start += count
    assert start == len(found.block_ids)
    return groups


PREFIX = [10, 11, 12, 13]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([], []),
        ([([1, 2], 5)], []),
        ([([1, 2], 5), ([3, 4], 5)], []),
        ([([*PREFIX, 1], 17), ([*PREFIX, 2], 18), ([3], 1), ([*PREFIX, 4], 16)], [({0, 1, 3}, PREFIX)]),
        # The block that a row writes to is its own, whoever has it too.
        ([([*PREFIX, 1], 17), (PREFIX, 15)], [({0, 1}, PREFIX[:3])]),
        ([([*PREFIX], 3), ([*PREFIX], 2)], []),
        # Drafted tokens of one request, on both sides of a block's end.
        ([(PREFIX, 11), (PREFIX, 12), (PREFIX, 13)], [({0, 1, 2}, PREFIX[:2])]),
        # A row that shares a single block does not spoil the others' four.
        ([([*PREFIX, 1], 17), ([10, 5, 6], 11), ([*PREFIX, 2], 17), ([*PREFIX, 3], 17)], [({0, 2, 3}, PREFIX)]),
        # Two groups, and what is left of the larger prefix after the inner group has gone.
        (
            [([10, 11, 12, 7], 12), ([10, 1], 5), ([20, 21], 4), ([10, 11, 12, 8], 13), ([20, 22], 6), ([10, 2], 5)],
            [({0, 3}, [10, 11, 12]), ({1, 5}, [10]), ({2, 4}, [20])],
        ),
    ],
)
def test_examples(rows: list[tuple[list[int], int]], expected: list[tuple[set[int], list[int]]]) -> None:
    found = groups_of(find(rows))
    assert sorted(found, key=lambda each: min(each[0])) == expected


def test_what_is_saved_must_be_enough() -> None:
    rows = [([*PREFIX, number], 17) for number in range(3)]
    assert find(rows, min_tokens=2 * 4 * SIZE) is not None
    assert find(rows, min_tokens=2 * 4 * SIZE + 1) is None


def test_a_group_that_saves_a_trifle_is_none() -> None:
    small, large = [([99, number], 5) for number in range(2)], [([*PREFIX, number], 17) for number in range(9)]
    assert len(groups_of(find([*small, *large], min_tokens=8 * 4 * SIZE, max_groups=8))) == 1
    assert len(groups_of(find([*small, *large], min_tokens=8 * SIZE, max_groups=8))) == 2


def test_the_most_groups() -> None:
    rows = [([group, 50 + row], 5) for group in range(12) for row in range(2)]
    assert len(groups_of(find(rows))) == 8
    assert len(groups_of(find(rows, max_groups=3))) == 3


@settings(max_examples=examples(200), deadline=None)
@given(
    st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=6), st.integers(0, 23)), max_size=12),
    st.integers(1, 4),
)
def test_groups_share_what_they_say(drawn: list[tuple[list[int], int]], max_groups: int) -> None:
    rows = [(table, min(before, len(table) * SIZE - 1)) for table, before in drawn]
    found = find(rows, max_groups=max_groups)
    full = [table[: before // SIZE] for table, before in rows]
    alike = [(one, two) for one in range(len(rows)) for two in range(one) if full[one][:1] == full[two][:1] != []]
    if found is None:
        assert not alike
        return
    assert alike
    assert sorted(found.order.tolist()) == list(range(len(rows)))
    assert found.num_groups == len(groups_of(found)) <= max_groups
    skipped = dict(zip(found.order.tolist(), found.num_skipped.tolist(), strict=True))
    for members, shared in groups_of(found):
        assert len(members) > 1
        assert shared
        assert all(full[row][: len(shared)] == shared for row in members)
        assert all(skipped.pop(row) == len(shared) for row in members)
    assert set(skipped.values()) <= {0}
    saved = [(len(members) - 1) * len(shared) for members, shared in groups_of(found)]
    best = 0  # of one group: all rows that begin with some row's prefix of some length
    for table in full:
        for length in range(1, len(table) + 1):
            best = max(best, (sum(each[:length] == table[:length] for each in full) - 1) * length)
    assert saved[0] == best


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=9))
def test_largest_rectangle(heights: list[int]) -> None:
    start, stop, height = _largest(heights)
    areas = {
        (one, two + 1): (two - one) * min(heights[one:two])
        for one in range(len(heights))
        for two in range(one + 1, len(heights) + 1)
    }
    assert height == min(heights[start : stop - 1])
    assert (stop - start - 1) * height == max(areas.values())
