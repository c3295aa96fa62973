"""What a store of responses keeps, for whom, for how long, and what makes room."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from common.errors import NotFoundError
from router.responses.store import ROW_BYTES, ResponseStore, StoredResponse

KEEP_S = 100.0
MANY = 10**9  # bytes
TURN_SIZE = 100  # in its conversation, of each response of these tests
SIZE = ROW_BYTES + TURN_SIZE + 900  # in the file, of each response of these tests


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


Open = Callable[..., ResponseStore]


@pytest.fixture
def open_store(tmp_path: Path, clock: Clock) -> Iterator[Open]:
    opened: list[ResponseStore] = []

    def make(name: str = "a", max_bytes: int = MANY, max_owner_bytes: int = MANY, **given: int) -> ResponseStore:
        path, limits = tmp_path / name, {"max_bytes": max_bytes, "max_owner_bytes": max_owner_bytes, **given}
        opened.append(ResponseStore(path, keep_s=KEEP_S, clock=clock, **limits))
        return opened[-1]

    yield make
    for one in opened:
        one.close()


def said(store: ResponseStore, owner: str = "alice", previous: str | None = None) -> str:
    """Adds a response. Returns its id, empty if it was not stored."""
    one = StoredResponse(
        response_id=store.new_id(),
        previous_id=previous,
        status="completed",
        input=b"i" * 50,
        output=b"o" * 50,
        response=b"r" * 900,
    )
    return one.response_id if store.add(one, owner, f"session of {owner}") else ""


def has(store: ResponseStore, response_id: str, owner: str = "alice") -> bool:
    try:
        return store.get(response_id, owner).response_id == response_id
    except NotFoundError:
        return False


def chain(store: ResponseStore, response_id: str, max_bytes: int = MANY) -> list[str]:
    return [one.response_id for one in store.earlier(response_id, "alice", max_bytes).turns]


def test_a_conversation_may_branch(open_store: Open) -> None:
    store = open_store()
    first = said(store)
    left, right = said(store, previous=first), said(store, previous=first)
    last = said(store, previous=right)
    assert chain(store, last) == [first, right, last]
    assert chain(store, left) == [first, left]
    assert store.earlier(last, "alice", MANY).session == "session of alice"
    with pytest.raises(ValueError, match="more than"):
        chain(store, last, 3 * TURN_SIZE - 1)
    assert chain(store, last, 3 * TURN_SIZE) == [first, right, last]


def test_it_survives_its_process_and_is_shared(open_store: Open) -> None:
    store = open_store()
    first = said(store)
    other = open_store()
    second = said(other, previous=first)
    store.close()
    assert chain(other, second) == [first, second]


def test_others_see_nothing(open_store: Open) -> None:
    store = open_store()
    mine = said(store)
    assert not has(store, mine, "bob")
    for use in (store.get, store.delete, lambda one, owner: store.earlier(one, owner, MANY)):
        with pytest.raises(NotFoundError, match="does not exist"):
            use(mine, "bob")
    assert not said(store, "bob", previous=mine)
    assert has(store, mine)


def test_an_id_says_which_file_has_it(open_store: Open) -> None:
    elsewhere = said(open_store("b"))
    with pytest.raises(NotFoundError, match="not kept here"):
        open_store().get(elsewhere, "alice")


def test_age_counts_from_the_last_turn(open_store: Open, clock: Clock) -> None:
    store = open_store()
    old, first = said(store), said(store)
    clock.now = KEEP_S - 1
    last = said(store, previous=first)
    clock.now = KEEP_S + 1
    assert [has(store, one) for one in (old, first, last)] == [False, True, True]
    assert store.clean() == 1
    assert chain(store, last) == [first, last]
    clock.now = 3 * KEEP_S
    assert not has(store, last)
    assert store.clean() == 2
    assert store.clean() == 0


def test_what_is_deleted_cannot_be_continued(open_store: Open) -> None:
    store = open_store()
    first = said(store)
    second = said(store, previous=first)
    third = said(store, previous=second)
    store.delete(second, "alice")
    assert [has(store, one) for one in (first, second, third)] == [True, False, True]
    assert chain(store, first) == [first]
    with pytest.raises(NotFoundError, match="was deleted"):
        chain(store, third)
    with pytest.raises(NotFoundError):
        store.delete(second, "alice")
    store.delete(first, "alice")
    store.delete(third, "alice")


def test_the_conversation_used_least_recently_makes_room(open_store: Open, clock: Clock) -> None:
    store = open_store(max_owner_bytes=4 * SIZE)
    first = said(store)
    clock.now += 1
    second = said(store)
    clock.now += 1
    first_again = said(store, previous=first)
    others = said(store, "bob")
    clock.now += 1
    said(store)
    assert [has(store, one) for one in (first, second, first_again)] == [True, True, True]
    new = said(store)
    assert [has(store, one) for one in (first, second, first_again, new)] == [True, False, True, True]
    assert has(store, others, "bob")
    for _ in range(4):
        new = said(store, previous=new)
        if not new:
            break
    assert not new, "one conversation alone has more than its owner may have"


def test_responses_are_counted_too(open_store: Open, clock: Clock) -> None:
    store = open_store(max_responses=2)
    all_of_them = []
    for _ in range(4):
        clock.now += 1
        all_of_them.append(said(store))
    assert [has(store, one) for one in all_of_them] == [False, False, True, True]


def test_who_has_most_makes_room_for_others(open_store: Open, clock: Clock) -> None:
    store = open_store(max_bytes=4 * SIZE)
    greedy = []
    for _ in range(4):
        clock.now += 1
        greedy.append(said(store))
    modest = said(store, "bob")
    assert [has(store, one) for one in greedy] == [False, True, True, True]
    last = said(store, previous=greedy[-1])
    assert has(store, modest, "bob")
    assert [has(store, one) for one in (*greedy, last)] == [False, False, True, True, True]


def test_another_kind_of_file(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "a") as db:
        db.execute("PRAGMA user_version = 7")
    with pytest.raises(sqlite3.DatabaseError, match="version 7 of responses"):
        ResponseStore(tmp_path / "a", keep_s=1, max_bytes=1, max_owner_bytes=1)
