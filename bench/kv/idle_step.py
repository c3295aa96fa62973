"""A control without a handoff: how much longer a decode step takes where the engine did nothing for some time before.

While a prompt is computed, the worker that will decode it may have nothing to do, and what its processor's caches held
is given to others, on a virtual machine to its neighbours too. The first step after that is a slow one, wherever the KV
comes from. Here an engine's model runs in a process alone, as `baton up` would have it run: it idles, then takes steps.

That process is `python -m bench.kv.idle_step MODEL_DIR DTYPE NUM_BLOCKS [CORE ...]`: it reads `LENGTH SECONDS` and
answers with milliseconds.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from common.config import EngineSettings, WorkerSettings
from common.errors import StartupError
from common.types import SamplingParams
from worker.engine_client import engine_environment

NUM_STEPS = 8  # after each pause; the first against the median of the others

IdleStep = Callable[[int, float], float]
"""Milliseconds that a decode step after so many tokens takes longer after so many idle seconds than right after another
one. Below zero where it was a fast one."""


@contextlib.contextmanager
def idle_steps(model_dir: Path, dtype: str, num_blocks: int, cores: tuple[int, ...]) -> Iterator[IdleStep]:
    """A process that computes on `cores`; anywhere where there are none. Raises `StartupError` where it fails."""
    command = [sys.executable, "-m", "bench.kv.idle_step", str(model_dir), dtype, str(num_blocks), *map(str, cores)]
    environment = engine_environment(WorkerSettings(cpu_cores=cores), os.environ)
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True, bufsize=1
    )

    def measure(length: int, idle_s: float) -> float:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(f"{length} {idle_s}\n")
            return float(process.stdout.readline())
        except (BrokenPipeError, ValueError):
            raise StartupError("a lone engine did not start; its reason is above") from None

    try:
        yield measure
    finally:
        process.kill()
        process.communicate()


def main(model_dir: str, dtype: str, num_blocks: str, *cores: str) -> None:
    if cores:  # before torch starts threads
        os.sched_setaffinity(0, map(int, cores))
    from engine.batch import SampleInput, SequenceInput
    from engine.model_runner import ModelRunner

    threads = int(os.environ.get("OMP_NUM_THREADS", "0")) or None
    runner = ModelRunner(Path(model_dir), EngineSettings(dtype=dtype, num_blocks=int(num_blocks), num_threads=threads))
    runner.warm_up()
    runner.kv_cache.zero_()
    sample = SampleInput(params=SamplingParams(temperature=0.0), num_output_tokens=0)

    def step_ms(length: int) -> float:
        blocks = list(range(length // runner.spec.block_size + 1))
        start = time.perf_counter()
        runner.execute([SequenceInput(token_ids=[0], num_computed_tokens=length, block_ids=blocks, sample=sample)])
        return (time.perf_counter() - start) * 1000

    for line in sys.stdin:
        length, idle_s = int(line.split()[0]), float(line.split()[1])
        step_ms(length)
        time.sleep(idle_s)
        first, *others = [step_ms(length) for _ in range(NUM_STEPS)]
        print(first - statistics.median(others), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
