"""What the tests of stores share: files of one directory, and blocks whose bytes follow from their number."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from common.errors import TransferError
from common.types import KVCacheSpec
from kv_store.shared_storage.block_files import BlockData, BlockFiles
from kv_store.shared_storage.file_clock import FileClock
from tests.kv_store.blocks import PATIENCE_S, SPEC, name_of


def files_of(kv_dir: Path, spec: KVCacheSpec = SPEC) -> BlockFiles:
    return BlockFiles(kv_dir, spec, FileClock(kv_dir.parent, "test"))


def path_of(kv_dir: Path, block_hash: bytes, spec: KVCacheSpec = SPEC) -> Path:
    """The block's name in the store."""
    return Path(files_of(kv_dir, spec).layout.block(block_hash))


def runs_of(kv_dir: Path) -> list[Path]:
    return sorted(Path(files_of(kv_dir).layout.runs).iterdir())


def data_of(number: int, spec: KVCacheSpec = SPEC) -> memoryview:
    return memoryview(number.to_bytes(4, "big") * (spec.block_bytes // 4))


def write(files: BlockFiles, numbers: Sequence[int]) -> list[int | str]:
    """One run. Bytes written, or why they could not be, for each block."""
    outcomes = files.write([BlockData(name_of(number), number, data_of(number)) for number in numbers])
    return [outcome.message if isinstance(outcome, TransferError) else outcome for outcome in outcomes]


def read(files: BlockFiles, numbers: Sequence[int]) -> list[str | None]:
    """Why each block could not be read. What was read is compared with what it has to be."""
    buffers = [memoryview(bytearray(SPEC.block_bytes)) for _ in numbers]
    errors = files.read([(name_of(number), buffer) for number, buffer in zip(numbers, buffers, strict=True)])
    for number, buffer, error in zip(numbers, buffers, errors, strict=True):
        assert error is not None or buffer == data_of(number), f"wrong bytes of {number}"
    return [error.message if error else None for error in errors]


@contextmanager
def hanging(*paths: Path) -> Iterator[Callable[[], None]]:
    """Whoever opens one of these files to read it hangs, until the function that this gives is called, or the end: then
    it is empty, for who comes later too. A named pipe does that."""
    pipes: dict[Path, int] = {}
    for path in paths:
        path.unlink()
        os.mkfifo(path)
        pipes[path] = os.open(path, os.O_PATH)  # the pipe itself, whatever its name is given to meanwhile

    def go_on() -> None:
        for path, pipe in pipes.items():
            writer = os.open(f"/proc/self/fd/{pipe}", os.O_RDWR | os.O_NONBLOCK)
            with contextlib.suppress(FileNotFoundError):  # who could not read it took it away
                if os.path.samestat(path.stat(), os.fstat(pipe)):
                    empty = path.with_name(f"{path.name}.empty")
                    empty.touch()
                    empty.replace(path)
            os.close(writer)

    try:
        yield go_on
    finally:
        go_on()
        for pipe in pipes.values():
            os.close(pipe)


@contextmanager
def hanging_writes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Whoever puts a file that he has written in its place hangs, until the function that this gives is called, or the
    end."""
    goes_on = threading.Event()
    replace_file = os.replace

    def hang(source: str, target: str) -> None:
        assert goes_on.wait(PATIENCE_S)
        replace_file(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", hang)
        try:
            yield goes_on.set
        finally:
            goes_on.set()


def flip(path: Path, offset: int) -> None:
    """Flips one bit of a file in place, as a bad disk does."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))
