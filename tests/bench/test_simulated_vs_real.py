"""`bench.simulated_vs_real`: both sides get the same requests, and errors are told."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.simulated_vs_real import Answer, Prompts, Row, figures, fleet_of, planned
from common.config import SimulateSettings
from common.errors import ConfigError
from common.traffic.requests import TrafficRequest, answer_id

ROOT = Path(__file__).parents[2]


def test_a_turn_repeats_the_real_answer() -> None:
    prompts = Prompts(seed=3)
    first = TrafficRequest(at=0.0, runs=((1, 8),), num_output_tokens=4)
    second = TrafficRequest(at=1.0, runs=((1, 8), (answer_id(1), 4), (2, 5)), num_output_tokens=4)
    asked = prompts.of(first)
    prompts.answered(first, [7, 8, 9, 10])
    assert prompts.of(second)[:12] == [*asked, 7, 8, 9, 10]
    assert len(Prompts(seed=3).of(second)) == 17, "the answer has not come yet: other tokens, as many"


def test_figures_and_errors() -> None:
    answers = [Answer(0.1, 0.5, 5), Answer(0.2, 0.2, 1)]
    found = figures(answers, 4.0)
    assert found["TTFT p90 ms"] == pytest.approx(200, rel=0.1)
    assert found["TPOT p50 ms"] == pytest.approx(100)
    assert found["requests/s"] == 0.5
    assert Row("TTFT p50 ms", 200.0, 180.0).error == pytest.approx(-0.1)


def test_a_fleet_is_named_by_its_workers() -> None:
    assert fleet_of("1P2D") == {"prefill": 1, "decode": 2, "both": 0}
    with pytest.raises(ConfigError, match="'2X' is not like"):
        fleet_of("2X")


def test_traffic_is_a_share_of_what_the_fleet_can_do() -> None:
    settings = SimulateSettings.model_validate({**fleet_of("1B"), "times": "xeon-135m", "num_blocks": 2048})
    half, tenth = (planned(settings, "bursts", 4.0, load) for load in (0.5, 0.1))
    assert len(half) > len(tenth) >= 4


@pytest.mark.slow
def test_the_command_compares_real_processes_with_a_simulation(tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    arguments = ["--device=simulated", "--times=xeon-135m", "--fleets=1B", "--workloads=conversations", "--seconds=3"]
    command = [sys.executable, "-m", "bench.simulated_vs_real", *arguments, f"--json={found}"]
    subprocess.run(command, cwd=ROOT, check=True, timeout=300)
    result = json.loads(found.read_text())["1B"]
    assert result["host_ms"] >= 0
    assert result["message_ms"] >= 0
    rows = result["workloads"]["conversations"]
    assert set(rows) == {"TTFT p50 ms", "TTFT p90 ms", "TPOT p50 ms", "TPOT p90 ms", "requests/s"}
    assert all(row["real"] > 0 and row["simulated"] > 0 for row in rows.values())
