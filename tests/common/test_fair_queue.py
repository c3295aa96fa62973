"""Owners take turns by what they used, whoever came first and however much each has waiting."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common import fair_queue
from common.fair_queue import FairQueue


def taken(queue: FairQueue[str], costs: dict[str, float]) -> list[str]:
    """All that waits, in the order in which it is taken; each piece of work costs its owner `costs`."""
    order = []
    while queue:
        owner, item = queue.take()
        order.append(item)
        queue.charge(owner, costs[owner])
    return order


def test_an_owner_with_little_work_does_not_wait_for_another_ones_backlog() -> None:
    queue = FairQueue[str]()
    for index in range(3):
        queue.add("heavy", f"heavy {index}")
    for index in range(3):
        queue.add("light", f"light {index}")
    order = taken(queue, {"heavy": 2.0, "light": 0.1})
    assert order == ["heavy 0", "light 0", "light 1", "light 2", "heavy 1", "heavy 2"]


def test_who_comes_later_owes_nothing_and_is_owed_nothing() -> None:
    queue = FairQueue[str]()
    for index in range(4):
        queue.add("early", f"early {index}")
    assert [queue.take() for _ in range(2)] == [("early", "early 0"), ("early", "early 1")]
    queue.charge("early", 1.0)
    queue.charge("early", 1.0)
    for index in range(3):
        queue.add("late", f"late {index}")
    order = taken(queue, {"early": 1.0, "late": 1.0})
    assert order == ["late 0", "late 1", "early 2", "late 2", "early 3"], "its two are made up for, and no more"


def test_whoever_has_most_waiting_makes_room() -> None:
    queue = FairQueue[str]()
    assert queue.make_room("a") is None
    for index in range(3):
        queue.add("a", f"a{index}")
    assert queue.make_room("a") is None
    assert queue.make_room("b") == "a2", "the last one"
    queue.add("b", "b0")
    assert queue.make_room("b") is None, "it would have as much as the other one"
    assert len(queue) == 3
    assert taken(queue, {"a": 1.0, "b": 1.0}) == ["a0", "b0", "a1"]


def test_clocks_of_the_past_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_queue, "MAX_CLOCKS", 3)
    queue = FairQueue[str]()
    for number in range(20):
        queue.add(f"owner {number}", "")
    taken(queue, {f"owner {number}": 1.0 for number in range(20)})
    for number in range(20, 40):
        queue.add(f"owner {number}", "")
        queue.take()
    assert len(queue._clocks) <= 21


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["add", "take", "remove", "room"])), max_size=60))
def test_nothing_is_lost_or_taken_twice_and_each_owner_keeps_its_order(steps: list[tuple[str, str]]) -> None:
    queue, waiting, number = FairQueue[int](), {owner: list[int]() for owner in "abc"}, 0
    for owner, step in steps:
        if step == "add":
            number += 1
            queue.add(owner, number)
            waiting[owner].append(number)
        elif step == "take" and queue:
            whose, item = queue.take()
            assert waiting[whose].pop(0) == item
            queue.charge(whose, float(item))
        elif step == "remove":
            item = waiting[owner][-1] if waiting[owner] else 0
            assert queue.remove(owner, item) is bool(waiting[owner])
            waiting[owner][-1:] = []
        elif step == "room":
            most = max(map(len, waiting.values()))
            displaced = queue.make_room(owner)
            assert (displaced is None) is (most <= len(waiting[owner]) + 1)
            if displaced is not None:
                (loser,) = [one for one in waiting.values() if displaced in one]
                assert len(loser) == most
                assert loser.pop() == displaced
        assert len(queue) == sum(map(len, waiting.values()))
