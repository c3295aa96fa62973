"""`bench.decide`: every way gets the same requests, and targets come from requests that were alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.decide import main
from bench.decide_ways import LATE_WAYS, WAYS, Answer, decide_as, piece, targets_of, traffic
from common.errors import ConfigError
from common.targets import LatencyTargets
from router.policy import routing

ROOT = Path(__file__).parents[2]


def written(folder: Path, lengths: tuple[int, ...] = (800, 12_800, 5000)) -> Path:
    trace = folder / "trace.jsonl"
    entries = [
        {"timestamp": 500 * number, "input_length": length, "output_length": 64}
        for number, length in enumerate(lengths * 8)
    ]
    trace.write_text("\n".join(map(json.dumps, entries)))
    return trace


def test_short_and_long_prompts_of_a_trace_are_scaled_by_kind(tmp_path: Path) -> None:
    found = traffic(written(tmp_path))
    assert {name: len(requests) for name, requests in found.items()} == {"chats": 8, "long prompts": 8, "mixed": 16}
    assert [(one.tenant, one.num_prompt_tokens, one.num_output_tokens) for one in found["mixed"][:2]] == [
        ("chat", 100, 8),
        ("long", 800, 4),
    ]
    with pytest.raises(ConfigError, match="lacks prompts of a kind"):
        traffic(written(tmp_path, (800,)))


def test_a_piece_has_the_rate_that_is_asked_for(tmp_path: Path) -> None:
    requests = traffic(written(tmp_path))["mixed"]
    first, second = (piece(requests, 5, number, 2.0) for number in (0, 1))
    assert [one.at for one in (first[0], first[-1])] == [0.0, 2.0]
    assert {one.runs for one in first}.isdisjoint(one.runs for one in second)
    assert len(piece(requests, 40, 3, 2.0)) == 40, "a trace is repeated if it is too short"


def test_targets_are_multiples_of_what_a_lone_request_takes() -> None:
    targets = targets_of({"chat": [Answer(0.1, 0.01)]})["chat"]
    assert targets.ttft_ms == pytest.approx(400)
    assert targets.tpot_ms == pytest.approx(25)
    assert Answer(0.39, 0.02).is_in_time(targets)
    assert not Answer(0.41, 0.02).is_in_time(targets)
    assert not Answer(0.39, 0.03).is_in_time(targets)
    assert Answer(0.39, None).is_in_time(LatencyTargets(400, 1))


def test_a_router_decides_in_its_own_way_again() -> None:
    own = routing.RoutingPolicy.pick, vars(routing)["all_know_their_times"]
    decide_as("always remote")
    assert routing.RoutingPolicy.pick is not own[0]
    decide_as("")
    assert (routing.RoutingPolicy.pick, vars(routing)["all_know_their_times"]) == own


def test_ways_and_an_oracle_are_compared_by_simulation(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    arguments = ["--simulated", "--sizes=2", "--loads=0.5", "--seconds=2", "--repeats=1", "--workload=chats"]
    assert main([str(written(tmp_path)), *arguments, f"--json={out}"]) == 0
    told = {one["way"]: one for one in json.loads(out.read_text())}
    found, late = [*(way.name for way in WAYS), "oracle"], [way.name for way in LATE_WAYS]
    assert [*told] == [*found, *late]
    assert len({told[name]["num"] for name in found}) == len({told[name]["num"] for name in late}) == 1
    assert all(told[name]["num_in_time"] <= told["oracle"]["num_in_time"] for name in found)
    assert {(told[name]["workload"], told[name]["load"]) for name in late} == {("mixed", 1.2)}


@pytest.mark.slow
def test_the_command_compares_real_processes(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    command = [sys.executable, "-m", "bench.decide", str(written(tmp_path)), "--device=simulated", "--times=xeon-135m"]
    command += ["--seconds=1", "--repeats=1", "--loads=0.5", "--workload=mixed", "--no-late", f"--json={out}"]
    told = subprocess.run(command, cwd=ROOT, check=True, timeout=600, capture_output=True, text=True).stdout
    found = json.loads(out.read_text())
    assert {one["way"] for one in found} == {way.name for way in WAYS}
    assert "chats' ITL p99 beside long prompts" in told
    assert all(one["num"] >= one["num_in_time"] for one in found)
