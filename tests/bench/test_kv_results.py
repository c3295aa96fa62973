"""Samples, bars and tables: arithmetic and words."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from bench.kv.colocated import poisson
from bench.kv.control import line
from bench.kv.exposed import OVERLAP, add_bars
from bench.kv.report import print_results
from bench.kv.results import Bar, Results, Samples


def test_percentiles_are_nearest_ranks() -> None:
    samples = Samples(tuple(float(i) for i in range(100, 0, -1)))
    assert (samples.percentile(0.25), samples.percentile(0.99), samples.percentile(1.0)) == (25.0, 99.0, 100.0)
    assert samples.median == 50.5
    assert Samples((3.0,)).percentile(0.99) == 3.0


def test_no_samples_are_a_defect() -> None:
    with pytest.raises(ValueError, match="no samples"):
        Samples(())


def test_records_are_found_by_some_of_their_labels() -> None:
    results = Results()
    for size in (16, 32):
        results.add("handoff", {"GB/s": [1.0, 3.0, 2.0], "empty": []}, system="nixl", block_size=size)
    assert len(list(results.find("handoff", "GB/s", system="nixl"))) == 2
    found = results.get("handoff", "GB/s", block_size=32)
    assert found is not None
    assert found.values == (1.0, 3.0, 2.0)
    assert results.get("handoff", "GB/s", block_size=64) is None
    assert results.get("handoff", "empty") is None
    assert results.labels("handoff", "block_size") == [16, 32]
    assert json.loads(json.dumps(results.records[0].as_json()))["values"] == [1.0, 3.0, 2.0]


@pytest.mark.parametrize(
    ("value", "is_met", "sentence"),
    [
        (2.0, True, "met: handoff: 2.0 ms (bar 3 ms, 1.0 ms to spare), at worst: 128 tokens; bound by memcpy"),
        (3.0, True, "met: handoff: 3.0 ms (bar 3 ms, 0.0 ms to spare), at worst: 128 tokens; bound by memcpy"),
        (4.5, False, "MISSED: handoff: 4.5 ms (bar 3 ms, 1.5 ms too much), at worst: 128 tokens; bound by memcpy"),
    ],
)
def test_a_bar_says_by_how_much(value: float, is_met: bool, sentence: str) -> None:
    bar = Bar(part="p", name="handoff", value=value, limit=3.0, unit="ms", where="at worst: 128 tokens", bound="memcpy")
    assert bar.is_met is is_met
    assert bar.sentence() == sentence


def exposed_results() -> Results:
    results = Results()
    for length, share, beyond in ((128, 9.0, 1.0), (2048, 2.0, 4.0), (8180, 1.0, 0.5)):
        for mode, factor in zip(OVERLAP, (1, 10), strict=True):
            figures = {
                "% of TTFT": [share * factor],
                "beyond transfer ms": [beyond * factor],
                "transfer ms": [0.5],
                "orchestration ms": [1.0, 2.0],
            }
            results.add("exposed", figures, connector="nixl", mode=mode, length=length)
    return results


def test_the_worst_length_counts_and_overlap_alone() -> None:
    results = exposed_results()
    add_bars(results)
    share, tail, p50, p99 = results.bars
    assert (share.value, share.where, share.is_met) == (2.0, "at worst: 2048 tokens", True)  # 128 is below the limit
    assert (tail.value, tail.where, tail.is_met) == (4.0, "at worst: 2048 tokens", False)
    assert tail.bound == "a transfer of 0.50 ms"
    assert (p50.value, p99.value) == (1.5, 2.0)


def test_the_table_has_a_row_for_each_set_of_labels() -> None:
    results = exposed_results()
    results.skipped["exposed: lmcache"] = "not installed [here]"
    add_bars(results)
    out = io.StringIO()
    print_results(results, Console(width=150, file=out))
    text = out.getvalue()
    assert text.count("no overlap") == 3
    assert "median [quartiles]" in text
    assert "skipped: exposed: lmcache: not installed [here]" in text
    assert "3 of 4 bars met" in text


def test_the_line_through_points() -> None:
    slope, intercept = line({10: 1.5, 20: 2.0, 30: 2.5})
    assert slope == pytest.approx(0.05)
    assert intercept == pytest.approx(1.0)


def test_arrivals_follow_from_the_seed() -> None:
    first, again, other = (list(poisson(seed, 100.0, 0.5, 8)) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert [one.at for one in first] == sorted(one.at for one in first)
    assert 0 < sum(one.is_long for one in first) < len(first) / 2
