"""`python -m bench.many_workers`, on a small fleet."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow


def test_a_worker_s_share_is_told() -> None:
    command = [sys.executable, "-m", "bench.many_workers", "--prefill=1", "--decode=2", "--seconds=0.1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    figures = dict(re.findall(r"│ ([\w' ]+?) +│ +(\d+) │", done.stdout))
    assert figures["workers' fronts"] == figures["workers' engines"] == "3"
    assert figures["fork server"] == figures["router"] == "1"
