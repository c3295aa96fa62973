"""Where a store's files lie. Any number of workers share the directory, whatever their models and layouts.

    <kv_dir>/v2-<layout>/runs/000032-….run        a run file: a few blocks, see `run_file`; named by the first one's
                                                  position in its request and a random number
    <kv_dir>/v2-<layout>/blocks/ab/abcdef….kv     a block's name: a hard link to the run that holds it
    <kv_dir>/v2-<layout>/writing/…                files being written
    <kv_dir>/<layout>/ab/abcdef….kv               version 1: nobody reads these any more

`<layout>` is the fingerprint, plus the shard's layers and tensor-parallel rank if it is not the whole: other
models and layouts never meet. Ranks of one whole find each other's blocks through `sharded_files`.
"""

from __future__ import annotations

import errno
import os
import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from common.types import KVCacheSpec
from kv_store.shared_storage.run_file import VERSION, RunName

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})  # what a file system without room answers

_LAYOUT = r"[0-9a-f]{32}(-layers\d+to\d+of\d+)?(-tp\d+of\d+)?"
_FOLDER = re.compile(rf"v{VERSION}-{_LAYOUT}")
_OLD_FOLDER = re.compile(_LAYOUT)
_RUN = re.compile(r"(\d+)-.+\.run")


@dataclass(slots=True, frozen=True)
class StoreLayout:
    """The files of one layout. Paths are strings, since `os` works faster with them and lookups are many."""

    root: str

    @classmethod
    def of(cls, kv_dir: Path, spec: KVCacheSpec) -> StoreLayout:
        return cls(str(kv_dir / f"v{VERSION}-{layout_name(spec)}"))

    @property
    def runs(self) -> str:
        return f"{self.root}/runs"

    @property
    def blocks(self) -> str:
        return f"{self.root}/blocks"

    @property
    def temps(self) -> str:
        return f"{self.root}/writing"

    def block(self, block_hash: bytes) -> str:
        name = block_hash.hex()
        return f"{self.root}/blocks/{name[:2]}/{name}.kv"

    def run(self, name: RunName) -> str:
        return f"{self.root}/runs/{name.position:06d}-{name.unique.hex()}.run"


def layout_name(spec: KVCacheSpec) -> str:
    return spec.fingerprint() + spec.shard_name


def layouts(kv_dir: Path) -> list[StoreLayout]:
    """Everyone's, of this version."""
    return [StoreLayout(entry.path) for entry in entries(str(kv_dir)) if _FOLDER.fullmatch(entry.name)]


def old_folders(kv_dir: Path) -> list[str]:
    """Folders that hold the files of version 1, and those being written: ab/….kv and tmp/…"""
    roots = [entry.path for entry in entries(str(kv_dir)) if _OLD_FOLDER.fullmatch(entry.name)]
    return [entry.path for root in roots for entry in entries(root) if re.fullmatch("[0-9a-f]{2}|tmp", entry.name)]


def position_in(run_name: str) -> int:
    """The position that a run file's name says; 0 if it says none."""
    match = _RUN.fullmatch(run_name)
    return int(match[1]) if match else 0


def entries(folder: str) -> Iterator[os.DirEntry[str]]:
    """What `folder` holds; nothing if somebody deleted it. Raises `OSError`."""
    try:
        with os.scandir(folder) as found:
            yield from found
    except FileNotFoundError:
        return


def unlink(path: str) -> bool:
    """False if there was nothing to delete. Raises other `OSError`s."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return False
    return True


def writer_id() -> str:
    """New with each call, on every host."""
    return f"{socket.gethostname()}-{os.getpid()}-{os.urandom(4).hex()}"
