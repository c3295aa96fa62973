"""Blocks as counts do what real blocks do, and names are equal only for equal tokens."""

from __future__ import annotations

import random

import pytest

from common.traffic.requests import answer_id
from simulation.counted.block_counts import BlockCounts
from simulation.counted.block_names import name_in_answer, names_of


def test_names_are_equal_as_far_as_tokens_are() -> None:
    one, _ = names_of([(0, 40), (1, 60)], 16)
    other, _ = names_of([(0, 40), (1, 24), (2, 36)], 16)
    assert len(one) == len(other) == 6
    assert [a == b for a, b in zip(one, other, strict=True)] == [True] * 4 + [False] * 2


def test_a_run_told_in_two_pieces_has_the_same_names() -> None:
    assert names_of([(7, 40), (7, 60)], 16) == names_of([(7, 100)], 16)


def test_where_a_run_begins_matters() -> None:
    assert names_of([(0, 32), (1, 32)], 32)[0][1] != names_of([(0, 16), (1, 48)], 32)[0][1]


def test_an_answer_that_is_repeated_has_the_names_of_its_blocks() -> None:
    names, chain = names_of([(5, 100)], 16)
    repeated, _ = names_of([(5, 100), (answer_id(5), 60)], 16)
    assert [*names, *(name_in_answer(chain, number) for number in range(len(names), 10))] == repeated


def test_empty_blocks_go_first_then_those_given_up_the_longest_ago() -> None:
    blocks = BlockCounts(4, is_cached=True)
    names = [b"a", b"b", b"c"]
    assert blocks.allocate(3, [])
    assert [blocks.name(one) for one in names] == [True] * 3
    blocks.give_up(names, 0)
    assert (blocks.num_owned, len(blocks.idle), blocks.num_empty) == (0, 3, 1)
    blocks.take(2)  # the end of a prefix goes before its beginning
    assert blocks.removed == [b"c"]
    assert blocks.find(names) == 2
    assert not blocks.allocate(4, names[:2]), "two of the two that are left are shared, and two are lacking"
    assert blocks.allocate(2, names[:2])
    with pytest.raises(ValueError, match="5 blocks are owned of 4"):
        blocks.take(1)


def test_of_equal_blocks_one_has_the_name() -> None:
    blocks = BlockCounts(4, is_cached=True)
    blocks.take(2)
    assert blocks.name(b"a")
    assert not blocks.name(b"a")
    blocks.give_up([b"a"], 1)
    assert (len(blocks.idle), blocks.num_empty) == (1, 3)


@pytest.mark.parametrize("seed", range(10))
def test_every_block_is_owned_cached_or_empty(seed: int) -> None:
    draw, blocks = random.Random(seed), BlockCounts(30, is_cached=True)
    requests: list[tuple[list[bytes], int]] = []
    for _ in range(300):
        prompt = [bytes([draw.randrange(3), number]) for number in range(draw.randrange(1, 8))]
        found = blocks.find(prompt)
        if draw.random() < 0.6 and blocks.allocate(len(prompt), prompt[:found]):
            held = prompt[:found] + [one for one in prompt[found:] if blocks.name(one)]
            requests.append((held, len(prompt) - len(held)))
        elif requests:
            held, num_unnamed = requests.pop(draw.randrange(len(requests)))
            blocks.give_up(held, num_unnamed)
        distinct = {name for held, _ in requests for name in held}
        assert blocks.num_owned == len(distinct) + sum(num for _, num in requests)
        assert blocks.num_owned + len(blocks.idle) + blocks.num_empty == 30
        assert blocks.num_empty >= 0
    for held, num_unnamed in requests:
        blocks.give_up(held, num_unnamed)
    assert blocks.num_owned == 0
