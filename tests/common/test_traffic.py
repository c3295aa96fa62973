"""Traffic: when requests come, how long they are, what they have in common, and the traces that they are read from."""

from __future__ import annotations

import gzip
import itertools
import json
import math
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from common.errors import ConfigError
from common.traffic import arrivals, sizes
from common.traffic.made import conversations, independent
from common.traffic.requests import TrafficRequest, answer_id, prompt_token_ids
from common.traffic.traces import (
    Turn,
    read_azure,
    read_conversations,
    read_mooncake,
    read_trace,
    repeated,
    scaled,
    write_trace,
)

NUM = 20_000


@pytest.mark.parametrize(
    ("times", "cv"),
    [
        (lambda: arrivals.poisson(4.0, 1), 1.0),
        (lambda: arrivals.gamma(4.0, 0.25, 1), 2.0),
        (lambda: arrivals.gamma(4.0, 16.0, 1), 0.25),
        (lambda: arrivals.bursts(4.0, 5, 1), math.sqrt(2 * 5 - 1)),
        (lambda: arrivals.steady(4.0), 0.0),
    ],
)
def test_arrivals_have_their_rate_and_burstiness(times: Callable[[], Iterator[float]], cv: float) -> None:
    at = arrivals.first(times(), NUM)
    assert at == arrivals.first(times(), NUM)  # fixed by the seed
    gaps = [after - before for before, after in itertools.pairwise(at)]
    assert min(gaps) >= 0
    assert statistics.fmean(gaps) == pytest.approx(0.25, rel=0.06)
    assert statistics.pstdev(gaps) / statistics.fmean(gaps) == pytest.approx(cv, rel=0.06, abs=1e-6)


def test_a_poisson_process_is_a_gamma_process_of_shape_one() -> None:
    assert arrivals.first(arrivals.poisson(2.0, 3), 9) == arrivals.first(arrivals.gamma(2.0, 1.0, 3), 9)


def test_rates_that_change() -> None:
    ramp = arrivals.until(arrivals.ramp(0.0, 20.0, 1000.0, 1), 1500.0)
    halves = [sum(start <= at < start + 500 for at in ramp) for start in (0, 500, 1000)]
    assert halves == [pytest.approx(num, rel=0.06) for num in (2500, 7500, 10_000)]
    day = arrivals.until(arrivals.day(10.0, 2400.0, 1), 4800.0)
    hours = [sum(start <= at < start + 100 for at in day) / 100 for start in range(0, 4800, 100)]
    assert hours[:24] == [pytest.approx(hour, abs=1.5) for hour in hours[24:]]
    assert hours[0] < 2
    assert max(hours) == pytest.approx(10.0, rel=0.1)
    assert max(hours[4:10]) > hours[12] < max(hours[14:20])  # two peaks, and a lunch between them


def test_arrivals_of_a_trace_and_their_end() -> None:
    assert arrivals.from_trace([105.0, 101.0, 103.0], speed=2.0) == [0.0, 1.0, 2.0]
    assert arrivals.from_trace([]) == []
    assert arrivals.until(arrivals.steady(2.0), 1.0) == [0.0, 0.5]
    with pytest.raises(ValueError, match=r"^rate: "):
        next(arrivals.poisson(0.0, 1))
    with pytest.raises(ValueError, match=r"^speed: "):
        arrivals.from_trace([], speed=-1.0)


def test_sizes() -> None:
    assert list(itertools.islice(sizes.fixed(7), 2)) == [7, 7]
    some = list(itertools.islice(sizes.uniform(2, 5, 1), 1000))
    assert {*some} == {2, 3, 4, 5}
    many = list(itertools.islice(sizes.lognormal(100.0, 1.0, 10, 1000, 1), NUM))
    assert statistics.median(many) == pytest.approx(100, rel=0.05)
    assert (min(many), max(many)) == (10, 1000)
    with pytest.raises(ValueError, match=r"^tokens: "):
        next(sizes.uniform(5, 2, 1))


def test_independent_prompts_share_what_they_are_told_to() -> None:
    made = [*independent([0.0, 1.0, 2.0], iter([10, 20, 4]), sizes.fixed(3), num_shared_tokens=6)]
    assert [one.runs for one in made] == [((0, 6), (1, 4)), ((0, 6), (2, 14)), ((0, 4),)]
    assert [one.num_prompt_tokens for one in made] == [10, 20, 4]
    first, second, _ = (prompt_token_ids(one, range(1000), 7) for one in made)
    assert first[:6] == second[:6]
    assert first[6:] != second[6:10]


def test_users_come_back_with_the_conversation_so_far() -> None:
    def made(seed: int) -> list[TrafficRequest]:
        lengths = sizes.fixed(100), sizes.fixed(50)
        return [*itertools.islice(conversations(2.0, *lengths, seed, max_prompt_tokens=5000), 4000)]

    requests = made(1)
    assert requests == made(1) != made(2)
    assert [one.at for one in requests] == sorted(one.at for one in requests)
    assert len(requests) / requests[-1].at == pytest.approx(2.0, rel=0.1)
    by_user: dict[str, list[TrafficRequest]] = {}
    for one in requests:
        by_user.setdefault(one.session, []).append(one)
    for turns in by_user.values():
        assert turns[0].runs[0] == (0, 64)
        for before, after in itertools.pairwise(turns):
            question = before.runs[-1][0]
            assert after.runs[:-1] == (*before.runs, (answer_id(question), 50))
    assert statistics.fmean(map(len, by_user.values())) == pytest.approx(5, rel=0.1)


# ----------------------------------------------------------------------------------------------------------- traces

MOONCAKE: list[dict[str, object]] = [
    {"timestamp": 3000, "input_length": 700, "output_length": 20, "hash_ids": [0, 5]},
    {"timestamp": 1000, "input_length": 513, "output_length": 0, "hash_ids": [0, 4]},
    {"timestamp": 4500, "input_length": 8, "output_length": 2},
]


def written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def lines(entries: list[dict[str, object]]) -> str:
    return "".join(json.dumps(entry) + "\n" for entry in entries)


def test_mooncakes_trace(tmp_path: Path) -> None:
    first, second, third = read_trace(written(tmp_path / "trace.jsonl", lines(MOONCAKE)))
    assert (first.at, first.runs, first.num_output_tokens) == (0.0, ((0, 512), (4, 1)), 1)
    assert (second.at, second.runs, second.num_output_tokens) == (2.0, ((0, 512), (5, 188)), 20)
    assert (third.at, third.num_prompt_tokens) == (3.5, 8)
    assert third.runs[0][0] not in (0, 4, 5)


def test_a_written_trace_is_read_as_it_was(tmp_path: Path) -> None:
    made = [
        TrafficRequest(at=at, runs=((0, 64), (7, 900), (answer_id(7), 3)), num_output_tokens=5) for at in (0.0, 0.3)
    ]
    write_trace(tmp_path / "trace", made)
    assert read_trace(tmp_path / "trace") == made


@pytest.mark.parametrize(
    ("runs", "reason"),
    [
        ("7", "runs: not a list"),
        ("[[1, 4], [2]]", "runs: [2] is not an id and a number of tokens"),
        ("[[1, 0], [2, 5]]", "runs: [1, 0] is not"),
        ("[[-1, 5]]", "runs: [-1, 5] is not"),
        ("[[1, 4]]", "runs: not of 5 tokens"),
    ],
)
def test_runs_of_a_trace_are_checked(tmp_path: Path, runs: str, reason: str) -> None:
    (tmp_path / "trace").write_text(f'{{"timestamp": 0, "input_length": 5, "output_length": 1, "runs": {runs}}}\n')
    with pytest.raises(ConfigError) as raised:
        read_trace(tmp_path / "trace")
    assert f"trace: {tmp_path / 'trace'}, line 1: {reason}" in raised.value.message


def test_azures_trace(tmp_path: Path) -> None:
    text = (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.9951690,396,109\n"
    )
    first, second = read_trace(written(tmp_path / "trace.csv", text))
    assert (first.at, first.num_prompt_tokens, first.num_output_tokens) == (0.0, 374, 44)
    assert second.at == pytest.approx(4.314579)
    assert first.runs[0][0] != second.runs[0][0]
    zoned = "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.009930+00:00,2162,5\n"
    assert read_trace(written(tmp_path / "zoned.csv", zoned))[0].num_prompt_tokens == 2162


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no column TIMESTAMP"),
        ('{"timestamp": 0, "input_length": 5\n', "line 1: not JSON"),
        ('{"timestamp": 0, "input_length": 0, "output_length": 1, "hash_ids": []}\n', "line 1: input_length"),
        ('{"timestamp": "x", "input_length": 5, "output_length": 1}\n', "line 1: timestamp"),
        ('{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1]}\n', "line 1: hash_ids"),
        ('{"timestamp": 0, "input_length": 6, "output_length": 1, "hash_ids": [-1]}\n', "line 1: hash_ids: -1"),
        ("TIMESTAMP,ContextTokens\n", "no column GeneratedTokens"),
        (200_000 * "x", "not CSV: field larger"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "no requests"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nnoon,1,1\n", "line 2: TIMESTAMP"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16,many,1\n", "line 2: ContextTokens"),
    ],
)
def test_a_trace_that_cannot_be_read_is_named_with_the_place(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        read_trace(written(tmp_path / "trace", text))


@pytest.mark.parametrize("read", [read_trace, read_azure, read_mooncake, read_conversations])
def test_a_file_that_is_not_text_is_named(tmp_path: Path, read: Callable[[Path], object]) -> None:
    path = tmp_path / "trace.gz"
    path.write_bytes(gzip.compress(b"{}"))
    with pytest.raises(ConfigError, match=r"trace\.gz: not text"):
        read(path)


def test_other_sizes_times_and_more_of_a_trace(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path / "trace.jsonl", lines(MOONCAKE)))
    half = [*scaled(trace, speed=2.0, lengths=0.5)]
    assert [one.at for one in half] == [0.0, 1.0, 1.75]
    assert half[0].runs == ((0, 256), (4, 1))  # one token at least
    more = [*repeated(trace, 7)]
    assert more[:3] == trace
    assert [one.at for one in more[3:]] == pytest.approx([5.25, 7.25, 8.75, 10.5])
    first, again = more[0].runs, more[3].runs
    assert [num for _, num in first] == [num for _, num in again]
    assert not {run_id for one in more[:3] for run_id, _ in one.runs} & {run_id for run_id, _ in again}
    with pytest.raises(ValueError, match=r"^speed: "):
        next(scaled(trace, speed=0.0))


def test_texts_of_conversations(tmp_path: Path) -> None:
    said = [
        {"from": "gpt", "value": "nobody asked"},
        {"from": "human", "value": "one?"},
        {"from": "gpt", "value": "1"},
        {"from": "human", "value": "two?"},
    ]
    share = [{"id": "a", "conversations": said}, {"id": "b", "conversations": []}]
    turns = [Turn("one?", "1"), Turn("two?", "")]
    assert read_conversations(written(tmp_path / "share.json", json.dumps(share))) == [turns]
    chat = {"messages": [{"role": "user", "content": "one?"}, {"role": "assistant", "content": "1"}]}
    assert read_conversations(written(tmp_path / "chat.jsonl", json.dumps(chat) + "\n")) == [turns[:1]]
    with pytest.raises(ConfigError, match="entry 0: neither"):
        read_conversations(written(tmp_path / "other.json", "[{}]"))
    with pytest.raises(ConfigError, match="no conversations"):
        read_conversations(written(tmp_path / "empty.json", "[]"))
