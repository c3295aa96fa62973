"""`bench.batches`: the whole of it, at a small size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_chats_beside_a_batch_are_timed(tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    sizes = ["--seconds=4", "--repeats=1", "--rate=1", "--tokens=4", "--line-tokens=4", "--lines=300"]
    command = [sys.executable, "-m", "bench.batches", *sizes, f"--json={found}"]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr  # 1: the bar is missed, which says nothing on a busy machine
    times = json.loads(found.read_text())
    assert set(times) == {"alone", "beside a batch"}
    assert len(times["alone"]) == len(times["beside a batch"]) > 0
    assert all(0 < first <= whole for one in times.values() for first, whole in one)
    assert "p99 of the whole answer" in done.stdout
