from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

from kv_store.base import LocalBlock
from kv_store.lmcache.groups import Group, GroupLayout, find_group, group_sizes, split_into_groups
from tests.kv_store.blocks import SPEC, name_of

SIZES = [1, 2, 4, 8, 16]


def blocks(*indexes: int) -> list[LocalBlock]:
    return [LocalBlock(index, 100 + index, name_of(index)) for index in indexes]


def names(groups: list[list[LocalBlock]]) -> list[tuple[int, ...]]:
    return [tuple(block.index for block in group) for group in groups]


@pytest.mark.parametrize(
    ("block_size", "sizes"), [(16, SIZES), (32, [1, 2, 4, 8]), (48, [1, 2, 4]), (256, [1]), (300, [1])]
)
def test_largest_groups_hold_256_tokens(block_size: int, sizes: list[int]) -> None:
    assert group_sizes(block_size) == sizes


def test_groups_are_aligned_powers_of_two() -> None:
    assert names(split_into_groups(blocks(*range(23)), SIZES)) == [
        tuple(range(16)),
        (16, 17, 18, 19),
        (20, 21),
        (22,),
    ]
    assert names(split_into_groups(blocks(*range(5, 33)), SIZES)) == [
        (5,),
        (6, 7),
        tuple(range(8, 16)),
        tuple(range(16, 32)),
        (32,),
    ]
    assert names(split_into_groups(blocks(3, 1, 0, 6), SIZES)) == [(0, 1), (3,), (6,)]
    assert split_into_groups([], SIZES) == []


def test_a_partial_block_is_a_group_by_itself() -> None:
    """Else the full blocks before it would be found by its hash alone, which no other prompt has."""
    tail = LocalBlock(19, 119, name_of(19), is_partial=True)
    assert names(split_into_groups([*blocks(*range(16, 19)), tail], SIZES)) == [(16, 17), (18,), (19,)]


def test_hashes_alone_find_every_block_of_any_writer() -> None:
    """Writers computed in any chunks; a reader that knows the hashes from some block to the end finds all of them."""
    dice = random.Random(7)
    for _ in range(200):
        num_blocks = dice.randrange(1, 60)
        cuts = sorted({0, num_blocks, *(dice.randrange(num_blocks) for _ in range(dice.randrange(4)))})
        stored: set[Group] = set()
        for start, stop in itertools.pairwise(cuts):
            for group in split_into_groups(blocks(*range(start, stop)), SIZES):
                stored.add(Group(len(group), group[-1].block_hash))
        hashes = {index: name_of(index) for index in range(dice.randrange(num_blocks), num_blocks)}
        for index in hashes:
            found = find_group(index, hashes, SIZES, stored.__contains__)
            assert found is not None
            known, indexes = found
            assert known in stored
            assert index in indexes
            assert known == Group(len(indexes), name_of(indexes[-1]))


def test_a_group_whose_last_hash_is_unknown_is_not_found() -> None:
    stored = {Group(4, name_of(3))}
    assert find_group(0, {0: name_of(0), 1: name_of(1)}, SIZES, stored.__contains__) is None
    assert find_group(4, {4: name_of(3)}, SIZES, stored.__contains__) is None


def test_hints() -> None:
    group = Group(16, name_of(77))
    assert Group.from_hint(group.hint(tp_size=2)) == (group, 2)
    name = name_of(1).hex()
    for garbage in (
        "",
        "prefill-1",
        "16:",
        "16:zz:1",
        "16:00:1",
        f"x:{name}:1",
        f"-1:{name}:1",
        f"16:{name}",
        f"1:{name}:",
    ):
        assert Group.from_hint(garbage) is None


class TestGroupLayout:
    @pytest.fixture
    def layout(self) -> GroupLayout:
        return GroupLayout(SPEC)

    def written(self, layout: GroupLayout, *hashes: bytes) -> tuple[np.ndarray, list[bytes]]:
        slot = np.full(layout.group_bytes(len(hashes)), 0xEE, np.uint8)
        data = [random.Random(number).randbytes(layout.block_bytes) for number in range(len(hashes))]
        layout.write(slot, hashes, [memoryview(block) for block in data])
        return slot, data

    def test_what_is_written_is_read(self, layout: GroupLayout) -> None:
        hashes = [name_of(number) for number in (4, 5, 6, 7)]
        slot, data = self.written(layout, *hashes)
        entries = layout.entries(slot, 4)
        assert entries is not None
        assert list(entries) == hashes
        for block_hash, block in zip(hashes, data, strict=True):
            into = bytearray(layout.block_bytes)
            assert layout.read(slot, 4, entries[block_hash], memoryview(into))
            assert into == block
        assert layout.holds(slot, hashes)
        assert not layout.holds(slot, [*hashes[:3], name_of(8)])

    def test_every_changed_byte_is_found(self, layout: GroupLayout) -> None:
        hashes = [name_of(1), name_of(2)]
        slot, _ = self.written(layout, *hashes)
        padding = set(range(40 + 2 * 24, layout.group_bytes(2) - 2 * layout.block_bytes))
        for position in range(len(slot)):
            if position not in padding:
                slot[position] ^= 1
                assert not layout.holds(slot, hashes), position
                slot[position] ^= 1
        assert layout.holds(slot, hashes)

    def test_layouts_keep_apart(self, layout: GroupLayout) -> None:
        slot, _ = self.written(layout, name_of(1))
        for other in (replace(SPEC, model_id="other"), replace(SPEC, tp_size=2, tp_rank=1)):
            assert GroupLayout(other).entries(slot, 1) is None
            assert GroupLayout(other).model_name(1) != layout.model_name(1)
