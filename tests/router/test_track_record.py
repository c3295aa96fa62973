"""Workers that fail or are slow are left alone for a while, and get another chance."""

from __future__ import annotations

from router.fleet import track_record
from router.fleet.track_record import MAX_FAILURES, MIN_ANSWERS, OPEN_S, SLOW_S, TrackRecord

A = ("a:1", "e1")


def tripped() -> TrackRecord:
    record = TrackRecord()
    for number in range(MAX_FAILURES):
        assert record.suspended(A, 0) == "", number
        record.failed(A, 0)
    return record


def test_failures_in_a_row_open_it() -> None:
    record = tripped()
    assert (record.state(A, 0), record.suspended(A, 0)) == (
        "open", "left alone for 5.0 s after 5 failures in a row",
    )  # fmt: skip
    assert record.suspended(("a:1", "e2"), 0) == "", "a restarted worker is another one"
    mixed = TrackRecord()
    for _ in range(3 * MAX_FAILURES):
        mixed.failed(A, 0)
        mixed.succeeded(A, 0)
    assert mixed.state(A, 0) == "closed"


def test_each_time_is_told() -> None:
    told: list[str] = []
    record = TrackRecord(told.append)
    for _ in range(MAX_FAILURES):
        record.failed(A, 0)
    assert told == ["failures"]
    record.failed(A, OPEN_S)
    assert told == ["failures"] * 2, "a probe that failed"


def test_one_request_at_a_time_probes_it() -> None:
    record = tripped()
    assert (record.state(A, OPEN_S), record.suspended(A, OPEN_S)) == ("half open", "")
    record.began(A)
    assert "probed by another" in record.suspended(A, OPEN_S)
    record.ended(A)
    assert record.suspended(A, OPEN_S) == "", "a probe that was cancelled says nothing"
    record.failed(A, OPEN_S)
    assert record.state(A, OPEN_S + 2 * OPEN_S - 0.1) == "open"
    assert record.state(A, OPEN_S + 2 * OPEN_S) == "half open"
    record.succeeded(A, 20)
    assert (record.state(A, 20), record.suspended(A, 20)) == ("closed", "")
    again = tripped()
    for now in range(0, 2000, 100):
        again.failed(A, now)
    assert again.state(A, 1900 + track_record.MAX_OPEN_S) == "half open"


def test_those_that_may_be_left_alone_are_named_until_once_after() -> None:
    record = tripped()
    assert record.troubled(0) == [A]
    assert record.troubled(OPEN_S) == [A], "half open: a probe changes it"
    record.succeeded(A, OPEN_S)
    assert [record.troubled(OPEN_S) for _ in range(2)] == [[A], []]


def test_requests_that_were_there_before_probe_nothing() -> None:
    record = TrackRecord()
    with record.probing(A):
        for _ in range(MAX_FAILURES):
            record.failed(A, 0)
        assert record.suspended(A, OPEN_S) == "", "one that goes on for an hour says nothing of now"
        with record.probing(A):
            assert "probed by another" in record.suspended(A, OPEN_S)
    assert record.suspended(A, OPEN_S) == ""


def test_a_probe_that_ends_early_ends_once() -> None:
    record = tripped()
    with record.probing(A), record.probing(A) as shorter:
        shorter.close()
        shorter.close()
        assert "probed by another" in record.suspended(A, OPEN_S)
    assert record.suspended(A, OPEN_S) == ""


def answers(record: TrackRecord, paces_ms: dict[str, float], now: float = 0, num: int = MIN_ANSWERS) -> None:
    for _ in range(num):
        for name, pace_ms in paces_ms.items():
            record.succeeded((name, "e"), now, num_tokens=11, elapsed_s=pace_ms * 10 / 1000)


def test_who_is_much_slower_than_the_others_is_left_alone() -> None:
    record = TrackRecord()
    answers(record, {"a": 30, "b": 40, "c": 50, "d": 200}, num=MIN_ANSWERS + 1)
    assert [record.state((name, "e"), 1) for name in "abcd"] == ["closed", "closed", "closed", "slow"]
    assert "slower than others" in record.suspended(("d", "e"), 1)
    assert record.suspended(("d", "e"), SLOW_S) == ""
    answers(record, {"d": 40}, now=SLOW_S)
    assert record.state(("d", "e"), SLOW_S) == "closed", "it begins anew"


def test_two_workers_have_no_median_and_most_are_never_slow() -> None:
    record = TrackRecord()
    answers(record, {"a": 30, "b": 3000}, num=9)
    assert record.state(("b", "e"), 0) == "closed"
    record = TrackRecord()
    answers(record, {"a": 30, "b": 30, "c": 30, "d": 900, "e": 900, "f": 30}, num=9)
    assert sum(record.state((name, "e"), 0) == "slow" for name in "abcdef") <= 2


def prompts(record: TrackRecord, times: dict[str, float], now: float = 0, num: int = MIN_ANSWERS) -> None:
    for _ in range(num):
        for name, times_usual in times.items():
            record.prefilled((name, "e"), now, times_usual)


def test_prefill_workers_are_compared_by_their_times_for_like_prompts() -> None:
    record = TrackRecord()
    answers(record, {"x": 40, "y": 40, "z": 40})
    prompts(record, {"a": 0.8, "b": 1, "c": 1.2, "d": 5}, num=MIN_ANSWERS + 1)
    assert [record.state((name, "e"), 1) for name in "abcdxyz"] == ["closed"] * 3 + ["slow"] + ["closed"] * 3
    assert "slower than others" in record.suspended(("d", "e"), 1)
    prompts(record, {"d": 1}, now=SLOW_S)
    assert record.state(("d", "e"), SLOW_S) == "closed", "it begins anew"


def test_who_does_both_kinds_of_work_is_left_alone_once() -> None:
    record = TrackRecord()
    answers(record, {"a": 40, "b": 40, "c": 40, "d": 400}, num=MIN_ANSWERS + 1)
    prompts(record, {"a": 1, "b": 1, "c": 5, "d": 1}, num=MIN_ANSWERS + 1)
    assert [record.state((name, "e"), 1) for name in "abcd"] == ["closed"] * 3 + ["slow"], "two of four are too many"


def test_some_prompts_that_were_not_cached_after_all_are_no_fault() -> None:
    record = TrackRecord()
    prompts(record, {"a": 1, "b": 1, "c": 1, "d": 1})
    for _ in range(9):
        prompts(record, {"d": 1000}, num=MIN_ANSWERS // 2)
        prompts(record, {"d": 1}, num=MIN_ANSWERS // 2 + 1)
        assert record.state(("d", "e"), 0) == "closed"
    prompts(record, {"d": 1000}, num=MIN_ANSWERS // 2 + 1)
    assert record.state(("d", "e"), 0) == "slow"


def test_short_answers_and_small_differences_say_nothing() -> None:
    record = TrackRecord()
    for _ in range(9):
        record.succeeded(A, 0, num_tokens=2, elapsed_s=100)
    assert record.state(A, 0) == "closed"
    answers(record, {"a": 1, "b": 1, "c": 1, "d": 10}, num=9)
    assert record.state(("d", "e"), 0) == "closed"


def test_former_workers_are_forgotten() -> None:
    record = tripped()
    record.forget_others({A})
    assert record.state(A, 0) == "open"
    record.forget_others(set())
    assert record.state(A, 0) == "closed"


def test_traffic_fades() -> None:
    record = TrackRecord()
    record.answered(A, 0, prompt=100, cached=60, output=30)
    record.answered(A, 0, prompt=100, cached=20, output=30)
    assert record.traffic(A, 0).hit_rate == 0.4
    assert record.traffic(A, 0).tokens_per_second == 1.0
    assert 0.3 < record.traffic(A, track_record.TRAFFIC_S).tokens_per_second < 0.4
    assert record.traffic(("b", ""), 0).hit_rate == 0
