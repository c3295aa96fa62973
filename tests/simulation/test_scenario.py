"""From flags to scenarios, traffic and pages."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from baton.cli.main import main
from common.config import SimulateSettings
from common.errors import ConfigError
from common.types import WorkerRole
from simulation.outcome import RequestOutcome
from simulation.report import page
from simulation.scenario import run, scenarios, traffic


def settings(**values: object) -> SimulateSettings:
    return SimulateSettings.model_validate(values)


def test_a_sweep_names_every_fleet_with_every_policy() -> None:
    found = scenarios(settings(policy="least_load, prefix_aware", sweep="prefill=0..1,decode=2", both=1))
    assert [(one.policy, one.fleet) for one in found] == [
        ("least_load", "2D + 1B"),
        ("least_load", "1P + 2D + 1B"),
        ("prefix_aware", "2D + 1B"),
        ("prefix_aware", "1P + 2D + 1B"),
    ]
    assert scenarios(settings(prefill=3))[0].num_workers[WorkerRole.PREFILL] == 3


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"sweep": "prefill=1-8"}, "sweep: 'prefill=1-8'"),
        ({"sweep": "decode=3..1"}, "sweep: 'decode=3..1' ends"),
        ({"sweep": "prefill=1..99,decode=1..99"}, "sweep: 9801 simulations"),
        ({"sweep": "prefill=1..99,decode=0..99"}, "sweep: 9900 simulations"),  # counted before they are looked at
        ({"decode": 0}, "decode: a fleet needs"),
        ({"both": 1, "autoscale": True}, "both: the planner"),
        ({"autoscale": True, "planner": "model"}, "target_ttft_ms: is needed"),
        ({"policy": "nearest"}, "policy: 'nearest'"),
        ({"times": "h1000"}, "times: h1000 is neither"),
        ({"decode_times": "h1000"}, "decode_times: h1000 is neither"),
        ({"goodput": "ttft=5"}, "goodput: 'ttft=5'"),
        ({"goodput": "ttft:5,ttft:6"}, "goodput: ttft is given twice"),
        ({"speed": 2}, "speed: means nothing without --trace"),
        ({"trace": "x", "rate": 2}, "rate: means nothing with --trace"),
        ({"trace": "/nowhere.jsonl"}, "trace: /nowhere.jsonl cannot be read"),
    ],
)
def test_what_is_wrong_is_named(values: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError) as raised:
        run(settings(**values))
    assert raised.value.message.startswith(reason)


@pytest.mark.parametrize("arrivals", ["poisson", "gamma", "bursts", "steady", "ramp", "day", "conversations"])
def test_made_traffic_is_the_same_for_the_same_seed(arrivals: str) -> None:
    made = traffic(settings(arrivals=arrivals, requests=20, rate=5, length_sigma=1, shared_tokens=64, seed=4))
    assert made == traffic(settings(arrivals=arrivals, requests=20, rate=5, length_sigma=1, shared_tokens=64, seed=4))
    assert made != traffic(settings(arrivals=arrivals, requests=20, rate=5, length_sigma=1, shared_tokens=64, seed=5))
    assert len(made) == 20


def test_a_failed_request_is_in_no_distribution() -> None:
    (result,) = run(settings(requests=3))
    failed = RequestOutcome(at=0.0, num_prompt_tokens=5, num_output_tokens=5, ttft_s=0.001, failure="no room")
    outcome = replace(result.outcome, requests=[*result.outcome.requests, failed])
    plots, others = (
        page([replace(result, outcome=one)], {}).split("<figure>")[1:4] for one in (result.outcome, outcome)
    )
    assert plots == others
    assert "time to first token" in plots[0]


def test_the_command_plays_a_trace_to_two_fleets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entry = {"timestamp": 10, "input_length": 600, "output_length": 3, "hash_ids": [0, 1]}
    trace, report = tmp_path / "trace.jsonl", tmp_path / "report.html"
    trace.write_text(json.dumps(entry) + "\n")
    command = ["simulate", "--trace", str(trace), "--requests", "2", "--sweep", "decode=1..2", "--out", str(report)]
    assert main([*command, "--goodput", "ttft:500", "tpot:50", "--json"]) == 0
    one, two = json.loads(capsys.readouterr().out)
    assert (one["workers"], two["workers"]["decode"]) == ({"prefill": 1, "decode": 1, "both": 0}, 2)
    assert one["requests"] == 2
    assert one["good_share"] == 1.0
    text = report.read_text()
    assert text.count("<path") == 8  # two fleets: three distributions, and what was under way
    assert "good answers by worker hours" in text
    assert "TTFT up to 500 ms, TPOT up to 50 ms" in text
    assert "p99_ttft_ms" in text
    assert main([*command, "--goodput", "e2e:0.1"]) == 0
    out = capsys.readouterr().out
    assert "1P + 2D" in out
    assert "not measured" in out
    assert main([*command, "--num-blocks", "20"]) == 0
    assert "1P + 2D: 2 requests failed: no decode worker can take the request" in capsys.readouterr().out
    assert main(["simulate", "--goodput", "ttft"]) == 2
    assert "goodput: 'ttft' has no number of milliseconds above 0" in capsys.readouterr().err
