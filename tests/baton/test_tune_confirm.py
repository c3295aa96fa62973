"""`baton tune --confirm`: stacks of real processes serve the traffic with what was found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from baton.cli.main import main
from tests.bench.test_kv_command import tiny_model

__all__ = ["tiny_model"]

pytestmark = pytest.mark.slow


def test_the_best_are_served_by_simulated_devices(
    tiny_model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    traffic = ["--requests=40", "--rate=4", "--prompt-tokens=60", "--output-tokens=5", "--times=xeon-135m"]
    fixed = ["--policy=least_load", "--max-num-batched-tokens=2048", "--chunk-size=512", "--max-num-seqs=64"]
    space = ["--workers=2", "--min-remote-tokens=16", "--queue-policy=fcfs", *fixed]
    real = ["--confirm", "--confirm-seconds=4", f"--model={tiny_model}", f"--out={tmp_path}"]
    assert main(["tune", *traffic, *space, *real, "--load=1", "--goodput=ttft:60000,tpot:60000", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["complete"]
    for one in found["finalists"]:
        confirmed = one["confirmed"]
        assert confirmed["how"] == "simulated devices, since xeon-135m is no measurement of this machine"
        assert (confirmed["good_share"], confirmed["expected_good_share"]) == (1.0, 1.0)
        assert confirmed["figures"]["completed"] > 5
        assert (confirmed["figures"]["failed"], confirmed["figures"]["refused"]) == (0, 0)
    assert "real run" in (tmp_path / "report.html").read_text()


def test_a_stack_that_does_not_start_is_told_and_loses_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    traffic = ["--requests=40", "--rate=4", "--prompt-tokens=60", "--output-tokens=5", "--load=1", "--both=1"]
    command = ["tune", *traffic, "--confirm", f"--model={tmp_path / 'none'}", f"--out={tmp_path / 'tuned'}"]
    assert main([*command, "--goodput", "ttft:60000"]) == 1
    assert "failed" in capfd.readouterr().out
    assert (tmp_path / "tuned" / "up.yaml").exists()
