"""A shared directory with a size limit, under workers that write more than it holds."""

from __future__ import annotations

import contextlib
import random
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import pytest

from baton.stack.stack_plan import free_ports
from tests.chaos.tiny_model import random_prompt, write_tiny_model
from tests.integration.stack import Fleet, running, wait_for

pytestmark = pytest.mark.timeout(600)

LIMIT_GB = 0.004
PROMPTS = [random_prompt(random.Random(number), 300) for number in range(24)]


class LimitedFleet(Fleet):
    """Each worker serves its metrics, at a port that `metrics_ports` knows."""

    metrics_ports: list[int]

    def __init__(self, folder: Path) -> None:
        self.metrics_ports = []
        model_dir = folder / "model"
        write_tiny_model(model_dir)
        super().__init__(folder, f"--model={model_dir}", f"--kv-dir-size-gb={LIMIT_GB}", prefill=1, decode=1)

    def flags_of(self, address: str) -> Sequence[str]:
        self.metrics_ports += free_ports(1)
        return (f"--metrics-port={self.metrics_ports[-1]}",)

    def metric(self, name: str) -> list[float]:
        """Of each worker that has it."""
        values = []
        for port in self.metrics_ports:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
                lines = answer.read().decode().splitlines()
            values += [float(line.split()[1]) for line in lines if line.startswith(f"{name} ")]
        return values

    def bytes_stored(self) -> int:
        num_bytes = 0
        for path in self.kv_dir.rglob("*.run"):
            with contextlib.suppress(FileNotFoundError):  # evicted just now
                num_bytes += path.stat().st_size
        return num_bytes


def test_answers_stay_right_and_the_directory_small(tmp_path: Path) -> None:
    limit = LIMIT_GB * 2**30
    fleet = LimitedFleet(tmp_path)
    with running(fleet), fleet.client() as client:
        answers: dict[int, tuple[int, ...]] = {}
        for turn in range(3):
            for number, prompt in enumerate(PROMPTS):
                salt = str(max(turn, 1))  # the second turn finds what is left of the first, the third is new
                result = client.generate(prompt, temperature=0.0, max_tokens=6, cache_salt=salt).result()
                assert answers.setdefault(number, result.token_ids) == result.token_ids
        wait_for("the directory is below its limit", lambda: fleet.bytes_stored() <= limit, 120)
        wait_for("evictions are counted", lambda: sum(fleet.metric("baton_kv_store_evicted_bytes_total")) > limit, 120)
        wait_for("what is left is known", lambda: 0 < max(fleet.metric("baton_kv_store_bytes")) <= limit, 120)
        assert sum(fleet.metric("baton_kv_store_evicted_runs_total")) > 0
