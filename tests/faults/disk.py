"""A store on a file system of its own, which can be full or hang, and files in it that go bad."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

FILLER = ".filler"


class Disk:
    """A small tmpfs if mounts are allowed, else a plain directory, which is never full."""

    def __init__(self, path: Path, megabytes: int = 256, options: str = "") -> None:
        self.path = path
        path.mkdir(exist_ok=True)
        self.why_not = _mount(path, f"size={megabytes}m{options}")
        # Unmounts when this process closes the pipe, or ends in whatever way.
        script = 'cat > /dev/null; umount --lazy "$1"'
        guard = ["sh", "-c", script, "sh", str(path)]
        self._guard = None if self.why_not else _started(guard)

    def fill(self) -> None:
        fill(self.path)

    def empty(self) -> None:
        """Deletes everything."""
        for path in self.path.iterdir():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)  # a worker may write there just now
            else:
                path.unlink(missing_ok=True)

    def files(self) -> list[Path]:
        """Each file once, however many names it has; one that vanishes meanwhile is left out."""
        found: dict[int, Path] = {}
        for path in self.path.rglob("*"):
            with contextlib.suppress(FileNotFoundError):
                if path.is_file() and path.name != FILLER:
                    found.setdefault(path.stat().st_ino, path)
        return list(found.values())

    def num_bytes(self) -> int:
        total = 0
        for path in self.files():
            with contextlib.suppress(FileNotFoundError):
                total += path.stat().st_size
        return total

    def close(self) -> None:
        """Raises `OSError` if it cannot be unmounted."""
        if self._guard is not None:
            _end(self._guard)


class FreezingDisk:
    """A small ext4 that can be frozen: whoever writes to it hangs, and cannot even be killed, until it thaws. Raises
    `OSError` with why there can be none."""

    def __init__(self, path: Path, megabytes: int = 64) -> None:
        path.mkdir()
        image = path.with_suffix(".img")
        with image.open("wb") as file:
            file.truncate(megabytes << 20)
        _run("mkfs.ext4", "-q", str(image))
        _run("mount", "-o", "loop", str(image), str(path))
        self._path = path
        # Thaws and unmounts when this process closes the pipe, or ends in whatever way.
        script = 'cat > /dev/null; fsfreeze -u "$1" 2> /dev/null; umount --lazy "$1"'
        guard = ["sh", "-c", script, "sh", str(path)]
        self._guard = _started(guard)

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        _run("fsfreeze", "-f", str(self._path))
        try:
            yield
        finally:
            _run("fsfreeze", "-u", str(self._path))

    def close(self) -> None:
        """Raises `OSError` if it cannot be unmounted."""
        _end(self._guard)


def _started(guard: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(guard, stdin=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)


def _end(guard: subprocess.Popen[bytes]) -> None:
    _, words = guard.communicate()
    if guard.returncode:
        raise OSError(f"umount: {words.decode().strip()}")


def fill(folder: Path) -> None:
    """Takes what its file system has left, to the last byte."""
    fd = os.open(folder / FILLER, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        size = 1 << 20
        while size:
            try:
                os.write(fd, b"\0" * size)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                size //= 2
    finally:
        os.close(fd)


def fill_inodes(folder: Path) -> None:
    """Until no further file can be made."""
    with contextlib.suppress(OSError):
        for number in itertools.count():
            (folder / f"{FILLER}-{number}").touch()


def _run(*command: str) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")


def corrupt(path: Path, how: int) -> None:
    """In place, as a bad disk would: one byte in the middle is another one, the end is missing, or all is."""
    size = path.stat().st_size
    if not size:
        return
    if how % 3 == 0:
        with path.open("r+b") as file:
            file.seek(size // 2)
            (byte,) = file.read(1)
            file.seek(size // 2)
            file.write(bytes([byte ^ 0xFF]))
    else:
        os.truncate(path, size // 2 if how % 3 == 1 else 0)


def _mount(path: Path, options: str) -> str:
    """Why it could not be mounted; empty if it was."""
    if os.geteuid() != 0:
        return "mounting a small file system needs root"
    command = ["mount", "-t", "tmpfs", "-o", options, "baton-faults", str(path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    return done.stderr.strip() if done.returncode else ""
