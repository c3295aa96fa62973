"""A model of time for workers of this machine: a data sheet's, as if `baton profile` had measured it here.

`python -m tests.integration.written_times MODEL CACHE` writes it for workers with `tests.integration.stack.FLAGS` and
`--cache-dir=CACHE`.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from common.batch_time_file import encode
from common.config import EngineSettings
from engine.learning.key import key_of, model_file
from engine.local.device import LocalDevice
from engine.simulated.data_sheet import simulated_time


def write_times(model_dir: Path, cache_dir: Path) -> None:
    settings = EngineSettings(dtype="float32", num_threads=1, num_blocks=16)
    key = key_of(LocalDevice(model_dir, settings), settings)
    cache_dir.mkdir()
    model_file(str(cache_dir), key).write_bytes(encode(replace(simulated_time("xeon-135m").time, key=key)))


if __name__ == "__main__":
    write_times(Path(sys.argv[1]), Path(sys.argv[2]))
