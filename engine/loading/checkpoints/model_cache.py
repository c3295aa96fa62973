"""Model directories that are converted once, completely or not at all, and found again by later starts."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from common.errors import StartupError
from common.model_files import open_model


def make_once(target: Path, what: str, make: Callable[[Path], None], report: Callable[[str], None]) -> None:
    """`make` fills the folder that it is given, which becomes `target`, a model's directory, when it is complete.

    One process at a time; a folder that a killed one left is removed. `report` gets a line if `what` is waited for, and
    when it is ready. Raises `StartupError`.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _one_at_a_time(target.with_name(f".{target.name}.lock"), what, report):
            if not target.is_dir():  # else another process has made it meanwhile
                _make_atomically(target, make)
                report(f"{what} ready in {target}")
    except OSError as error:
        raise StartupError(f"cannot keep {what} in {target.parent} ({error}); set --cache-dir") from error


@contextmanager
def _one_at_a_time(lock_file: Path, what: str, report: Callable[[str], None]) -> Iterator[None]:
    """Holds a lock that the kernel releases if its holder dies in any way."""
    with lock_file.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report(f"another process is converting {what}, waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _make_atomically(target: Path, make: Callable[[Path], None]) -> None:
    """Call with the lock held."""
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a converter that was killed
    partial.mkdir()
    try:
        make(partial)
        open_model(partial)
        partial.rename(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
