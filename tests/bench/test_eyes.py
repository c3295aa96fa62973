"""What it costs to see: pairs of figures, and that both kinds of process answer."""

from __future__ import annotations

import subprocess
import sys

import pytest

from bench.eyes import OFF, ON, paired


def test_pairs_take_turns_after_a_warm_up() -> None:
    asked: list[str] = []

    def measure(kind: str) -> float:
        asked.append(kind)
        return float(len(asked))

    pairs = paired({OFF: lambda: measure(OFF), ON: lambda: measure(ON)}, 2)
    assert asked == [ON, OFF, OFF, ON, ON, OFF]
    assert pairs == [(3.0, 4.0), (6.0, 5.0)]


@pytest.mark.slow
def test_a_router_and_a_front_of_each_kind_answer() -> None:
    command = [sys.executable, "-m", "bench.eyes", "--streams=4", "--tokens=4", "--seconds=0.2", "--repeats=1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if "%" in line]
    assert ["router" in rows[0], "front" in rows[1]] == [True, True], done.stdout
