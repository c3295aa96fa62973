"""`bench.noisy_tenant`: the whole of it, and that it tells what is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_quiet_tenant_is_never_refused_whoever_is_beside_it(tmp_path: Path) -> None:
    """With two processes: the limit is of the router as a whole."""
    found = tmp_path / "found.json"
    arguments = ["--seconds=2", "--repeats=1", "--limit=1", "--processes=2", f"--json={found}"]
    subprocess.run([sys.executable, "-m", "bench.noisy_tenant", *arguments], cwd=ROOT, check=True)
    result = json.loads(found.read_text())
    assert result["problems"] == []
    assert len(result["runs"]) == 2 * 3  # the first of each warms up
    assert all(one["status"] == "OK" for run in result["runs"] for one in run["quiet"]["requests"])
    at_20_times = [run for run in result["runs"] if run["system"] == "beside one at 20 x its limit"]
    assert all(run["noisy"]["requests"] for run in at_20_times)
    p99 = result["figures"]["quiet p99 ms"]
    assert {*p99} == {"alone", "beside one within its limit", "beside one at 20 x its limit"}
    assert all(figure["median"] > 0 for figure in p99.values())
