from __future__ import annotations

import threading

from kv_store.fair_queue import FairQueue


def test_jobs_take_turns() -> None:
    queue: FairQueue[str, int] = FairQueue()
    queue.put("long", range(5))
    queue.put("short", [10])
    queue.put("empty", [])
    queue.put_turn("turn")
    assert [queue.take(2) for _ in range(5)] == [
        ("long", [0, 1]),
        ("short", [10]),
        ("turn", []),
        ("long", [2, 3]),
        ("long", [4]),
    ]
    assert queue.take(2, timeout_s=0.0) is None


def test_a_job_s_last_items_go_with_the_rest() -> None:
    queue: FairQueue[str, int] = FairQueue()
    queue.put("one", range(8))
    assert queue.take(4, spare=1) == ("one", [0, 1, 2, 3])
    queue.put("one", range(5))
    assert queue.take(3, spare=1) == ("one", [4, 5, 6, 7])
    assert queue.take(4, spare=1) == ("one", [0, 1, 2, 3, 4])


def test_jobs_that_are_not_accepted_keep_their_turn() -> None:
    queue: FairQueue[str, int] = FairQueue()
    queue.put("stuck", [1])
    queue.put("good", [2, 3])
    assert queue.take(1, accepts=lambda job: job != "stuck") == ("good", [2])
    assert queue.take(1, timeout_s=0.0, accepts=lambda _: False) is None
    assert queue.take(1) == ("stuck", [1])
    assert queue.take(1) == ("good", [3])


def test_what_is_dropped_is_gone() -> None:
    queue: FairQueue[str, int] = FairQueue()
    queue.put("one", [1, 2, 3])
    queue.put("two", [4])
    assert queue.take(2) == ("one", [1, 2])
    assert queue.drop_all() == [("two", [4]), ("one", [3])]
    assert queue.drop_all() == []
    queue.put("three", [5])
    assert queue.take(2) == ("three", [5])


def test_close_ends_waiting_takers_and_drops_the_rest() -> None:
    queue: FairQueue[str, int] = FairQueue()
    taken: list[object] = []
    thread = threading.Thread(target=lambda: taken.append(queue.take(1)))
    thread.start()
    queue.close()
    thread.join(60)
    assert taken == [None]
    queue.put("late", [1])
    assert queue.is_closed
    assert queue.take(1) is None
