"""`baton bench sweep`, `latency` and `throughput` with real processes and a real engine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.command import BENCH
from tests.bench.test_kv_command import tiny_model

__all__ = ["tiny_model"]

pytestmark = pytest.mark.slow


def test_a_sweep_starts_a_stack_for_each_ratio(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "sweep.html"
    stacks = ["--pd=1:1,1:2", "--up=--device=simulated", f"--up=--model={tiny_model}"]
    load = ["--concurrencies=1,3", "--num-prompts=6", "--random-input-len=40", "--random-output-len=4", "--repeats=2"]
    code = BENCH.main(["sweep", *stacks, *load, "--json", "-o", str(page)], standalone_mode=False)
    points = json.loads(capsys.readouterr().out)["points"]
    assert [(point["label"], point["max_concurrency"]) for point in points] == [
        ("1P:1D", 1), ("1P:1D", 3), ("1P:2D", 1), ("1P:2D", 3),
    ]  # fmt: skip
    for point in points:
        assert (point["completed"], point["failed"], len(point["repeats"])) == (6, 0, 2)
        assert point["total_output_tokens"] == 24
        assert point["total_cached_tokens"] == 0  # no prompt is asked twice
    assert code == (0 if all(point["valid"] for point in points) else 1)  # a busy machine makes the client late
    assert "1P:2D" in page.read_text()


def test_a_load_needs_no_torch() -> None:
    """A router's image has neither torch nor numpy."""
    check = "import sys, bench.command, bench.serving.serve, bench.serving.openai, bench.serving.grpc_endpoint as _; "
    check += "sys.exit(str({'torch', 'numpy', 'transformers', 'matplotlib'} & sys.modules.keys() or ''))"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=120)
    assert done.stderr.strip() == ""


def test_latency_and_throughput(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = [f"--model={tiny_model}", "--num-threads=1", "--num-blocks=64", "--dtype=float32", "--json"]
    iterations = ["--batch-size=2", "--output-len=4", "--num-iters=3", "--num-iters-warmup=1"]
    file = tmp_path / "latency.json"
    assert BENCH.main(["latency", *iterations, *engine, f"--output-json={file}"], standalone_mode=False) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads(file.read_text())
    assert len(found["latencies"]) == 3
    assert min(found["latencies"]) <= found["percentiles"]["50"] <= max(found["latencies"])
    lengths = ["--num-prompts=5", "--input-len=20", "--output-len=6"]
    assert BENCH.main(["throughput", *lengths, *engine], standalone_mode=False) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["num_requests"], found["total_num_tokens"], found["total_output_tokens"]) == (5, 130, 30)
    assert found["tokens_per_second"] == pytest.approx(130 / found["elapsed_time"])
    assert BENCH.main(["latency", "--input-len=100", "--output-len=9000", *engine], standalone_mode=False) == 1
    assert "exceed the model's context" in capsys.readouterr().err
