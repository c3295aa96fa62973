"""Part 4: time to first token of prompts that a store holds, against computing them, on workers that just started."""

from __future__ import annotations

import shutil
import tempfile
from collections import defaultdict
from pathlib import Path

from bench.kv.client import Prompts
from bench.kv.results import Results
from bench.kv.settings import BenchSettings, Progress
from bench.kv.stacks import stack

PART = "store"
NUM_NEW = 4
LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192)
QUICK_LENGTHS = (256, 1024)
_SHM = Path("/dev/shm")


def run(settings: BenchSettings, results: Results, progress: Progress) -> None:
    if "shared_storage" not in settings.connectors:
        results.skipped[f"{PART}: shared_storage"] = "not among --connectors"
        return
    kv_dir = Path(tempfile.mkdtemp(prefix="baton-bench-", dir=_SHM if _SHM.is_dir() else None))
    try:
        measure(settings, results, progress, kv_dir)
    finally:
        shutil.rmtree(kv_dir, ignore_errors=True)


def measure(settings: BenchSettings, results: Results, progress: Progress, kv_dir: Path) -> None:
    """The first stack computes the prompts and ends; the second, new, is asked for them and for others, in turns."""
    arguments = ("--connector=shared_storage", f"--kv-dir={kv_dir}")
    prompts = Prompts(settings.seed, PART)
    stored: dict[int, list[list[int]]] = {}
    with stack(settings, *arguments) as client:
        limit = client.max_model_len() - NUM_NEW
        for length in sorted({min(length, limit) for length in (QUICK_LENGTHS if settings.quick else LENGTHS)}):
            progress(f"{PART}: filling, prompts of {length} tokens")
            stored[length] = [prompts.new(length) for _ in range(settings.repeats)]
            for prompt in stored[length]:
                client.generate(prompt, NUM_NEW)
    with stack(settings, *arguments) as client:
        for length, hits in stored.items():
            progress(f"{PART}: prompts of {length} tokens")
            figures: defaultdict[str, list[float]] = defaultdict(list)
            for prompt in hits:
                hit, miss = client.generate(prompt, NUM_NEW), client.generate(prompts.new(length), NUM_NEW)
                figures["hit TTFT ms"].append(hit.ttft_ms)
                figures["recompute TTFT ms"].append(miss.ttft_ms)
                figures["speed-up"].append(miss.ttft_ms / hit.ttft_ms)
                figures["MB read"].append(hit.report.num_bytes_moved / 1e6)
            results.add(PART, figures, connector="shared_storage", length=length)
