"""What it costs to see: rounds of figures, and that both kinds of process answer."""

from __future__ import annotations

import logging
import math
import subprocess
import sys
from functools import partial

import pytest

from bench.eyes import OFF, ON, QUIET, in_turns, parts


def test_kinds_take_turns_after_a_warm_up() -> None:
    asked: list[str] = []

    def measure(kind: str) -> float:
        asked.append(kind)
        return float(len(asked))

    rounds = in_turns({kind: partial(measure, kind) for kind in (OFF, QUIET, ON)}, 2)
    assert asked == [OFF, QUIET, ON, QUIET, ON, OFF, ON, OFF, QUIET]
    assert rounds == [{QUIET: 4.0, ON: 5.0, OFF: 6.0}, {ON: 7.0, OFF: 8.0, QUIET: 9.0}]


def test_every_part_is_measured_and_nobody_s_log_has_it(caplog: pytest.LogCaptureFixture) -> None:
    before = logging.getLogger().level, logging.getLogger().handlers[:]
    found = parts(repeats=1, calls=20)
    assert len(found) == 4
    assert all(map(math.isfinite, found.values()))
    assert (logging.getLogger().level, logging.getLogger().handlers) == before


@pytest.mark.slow
def test_a_router_and_a_front_of_each_kind_answer() -> None:
    command = [sys.executable, "-m", "bench.eyes", "--streams=4", "--tokens=4", "--seconds=0.2", "--repeats=1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    words = " ".join(done.stdout.split())
    assert ["a router, over REST" in words, "a decode worker's front" in words] == [True, True], done.stdout
    rows = [line for line in done.stdout.splitlines() if any(f" {kind} " in line for kind in (OFF, QUIET, ON))]
    assert sum(any(map(str.isdecimal, row)) for row in rows) == 5, done.stdout
