"""`baton profile --steps`: where the time of a running worker goes."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from baton.cli.ask import connect
from common.config import ClientSettings

if TYPE_CHECKING:
    from baton.client.report import Profile

MAX_STEPS, MAX_SECONDS = 500, 300.0  # that workers take
_NAMES = {
    "trace.json.gz": "trace of the engine's steps, for ui.perfetto.dev or chrome://tracing",
    "engine.svg": "flame graph of the engine",
    "front.svg": "flame graph of the front",
}


def profile_worker(
    settings: ClientSettings, worker: str, *, num_steps: int, seconds: float | None, direct: bool, out: str | None
) -> int:
    """Writes what the worker gives into the folder `out`. Returns 1 if there is no trace."""
    if direct:
        settings = settings.model_copy(update={"router": worker})
    with connect(settings) as client:
        taken = client.profile_worker("" if direct else worker, num_steps=num_steps, timeout_s=seconds or 0.0)
    return write_profile(taken, worker, out)


def write_profile(taken: Profile, worker: str, out: str | None) -> int:
    """Writes files into the folder `out`. Returns 1 if there is no trace."""
    folder = Path(out or ".")
    folder.mkdir(parents=True, exist_ok=True)
    if taken.num_steps:
        print(f"{taken.num_steps} steps of {worker} in {taken.seconds:.3f} s")
    for name, content in taken.files.items():
        path = folder / _plain(f"{worker}.{name}")
        path.write_bytes(content)
        print(f"{_NAMES.get(name, name)}: {path}")
    for note in taken.notes:
        print(note, file=sys.stderr)
    return 0 if taken.num_steps else 1


def _plain(name: str) -> str:
    """A file's name without what a path or a shell could misread. A part of it comes from the worker."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", name)
