from __future__ import annotations

import pytest

from kv_store.nixl.slots import ServedSlots


def test_a_slot_is_free_again_when_all_ranks_have_read_it() -> None:
    slots = ServedSlots(2)
    first, second = slots.take(1, 2)
    assert (first % 2, second % 2, slots.num_free) == (0, 1, 0)
    slots.report(first, rank=0, num_readers=2)
    slots.report(first, rank=0, num_readers=2)  # the same rank again
    assert slots.num_free == 0
    slots.report(first, rank=1, num_readers=2)
    assert slots.num_free == 1
    (again,) = slots.take(2, 1)
    assert again % 2 == first % 2
    assert again != first


def test_a_late_report_frees_nothing() -> None:
    slots = ServedSlots(1)
    (old,) = slots.take(1, 1)
    slots.release(1)
    (new,) = slots.take(2, 1)
    slots.report(old, rank=0, num_readers=1)
    assert slots.num_free == 0
    slots.report(new, rank=0, num_readers=1)
    assert slots.num_free == 1


def test_the_end_of_a_lease_frees_what_was_not_read() -> None:
    slots = ServedSlots(3)
    tickets = slots.take(1, 2)
    slots.take(2, 1)
    slots.report(tickets[0], rank=0, num_readers=1)
    slots.release(1)
    slots.release(1)
    assert slots.num_free == 2


def test_more_than_there_are() -> None:
    slots = ServedSlots(2)
    with pytest.raises(IndexError):
        slots.take(1, 3)
    assert slots.num_free == 2
