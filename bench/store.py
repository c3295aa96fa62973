"""How fast KV blocks go to files and come back: one file per block against run files, page cache against O_DIRECT,
several numbers of threads, and NIXL's POSIX backend; in turn, on the file system of `--dir`.

    python -m bench.store --dir DIR [--block-kb 360] [--total-mb 512] [--threads 1 2] [--repeats 3] [--json FILE]

Figures are GB/s of blocks, checksums made and verified included. *Write*: until the calls return. *Synced*: until the
disk has it too. *Cold*: each file was dropped from the page cache. *Warm*: they were just read.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import mmap
import os
import shutil
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import xxhash

from bench.measure import Row, interleave, print_table, write_json
from common.types import KVCacheSpec
from kv_store.shared_storage.block_files import BlockData, BlockFiles
from kv_store.shared_storage.file_clock import FileClock
from kv_store.shared_storage.layout import writer_id
from kv_store.shared_storage.run_file import HEADER_BYTES, RUN_BYTES, RunTable, read_blocks

_TOKENS, _HEADS, _HEAD_DIM = 16, 3, 64
_LAYER_BYTES = 2 * _TOKENS * _HEADS * _HEAD_DIM * 2  # K and V of one layer in a block, bfloat16: 12 KiB
_DIGEST = bytes(16)


class Memory:
    """Blocks in memory that begin at pages, as O_DIRECT needs them."""

    def __init__(self, num_blocks: int, block_bytes: int, slice_blocks: int) -> None:
        self.block_bytes = block_bytes
        self.num_bytes = num_blocks * block_bytes
        self.map = mmap.mmap(-1, self.num_bytes)
        pattern = os.urandom(block_bytes)
        view = memoryview(self.map)
        self.blocks = [view[n * block_bytes : (n + 1) * block_bytes] for n in range(num_blocks)]
        for number, block in enumerate(self.blocks):
            block[:] = pattern
            block[:8] = number.to_bytes(8, "big")
        self.names = [hashlib.blake2b(block[:8], digest_size=16).digest() for block in self.blocks]
        self.slices = [range(n, min(n + slice_blocks, num_blocks)) for n in range(0, num_blocks, slice_blocks)]

    def clear(self) -> None:
        for block in self.blocks:
            block[:8] = bytes(8)

    def check(self) -> None:
        if any(block[:8] != number.to_bytes(8, "big") for number, block in enumerate(self.blocks)):
            raise RuntimeError("wrong blocks were read")


class System(ABC):
    """One way to keep blocks. Each call does one slice's work."""

    def __init__(self, folder: Path, memory: Memory, num_threads: int) -> None:
        self.folder = folder
        self.memory = memory
        self.num_threads = num_threads

    @abstractmethod
    def start(self) -> None:
        """An empty store."""

    @abstractmethod
    def write(self, numbers: range) -> None: ...

    @abstractmethod
    def read(self, numbers: range) -> None: ...

    def measure(self) -> Mapping[str, float]:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        self.start()
        files: list[Path] = []
        start = time.perf_counter()
        figures = {"write GB/s": self._timed(self.write)}
        files = list({path.stat().st_ino: path for path in self.folder.rglob("*") if path.is_file()}.values())
        _each(files, os.fdatasync)
        figures["write, synced GB/s"] = self.memory.num_bytes / (time.perf_counter() - start) / 1e9
        _each(files, lambda fd: os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED))
        for name in ("cold read GB/s", "warm read GB/s"):
            self.memory.clear()
            figures[name] = self._timed(self.read)
            self.memory.check()
        shutil.rmtree(self.folder)
        return figures

    def _timed(self, work: Callable[[range], None]) -> float:
        with ThreadPoolExecutor(self.num_threads) as pool:
            start = time.perf_counter()
            for _ in pool.map(work, self.memory.slices):
                pass
            return self.memory.num_bytes / (time.perf_counter() - start) / 1e9


class Stored(System):
    """What the connector does. Without hard links each block is a file."""

    has_links = True

    def start(self) -> None:
        layers = self.memory.block_bytes // _LAYER_BYTES
        spec = KVCacheSpec(
            model_id="bench", num_layers=layers, num_kv_heads=_HEADS, head_dim=_HEAD_DIM, block_size=_TOKENS,
            dtype="bfloat16",
        )  # fmt: skip
        self._files = BlockFiles(self.folder, spec, FileClock(self.folder, writer_id()))
        self._files.has_links = self.has_links

    def write(self, numbers: range) -> None:
        memory = self.memory
        outcomes = self._files.write([BlockData(memory.names[n], n, memory.blocks[n]) for n in numbers])
        if outcomes != [memory.block_bytes] * len(numbers):
            raise RuntimeError(f"not written: {outcomes}")

    def read(self, numbers: range) -> None:
        errors = self._files.read([(self.memory.names[n], self.memory.blocks[n]) for n in numbers])
        if any(errors):
            raise RuntimeError(f"not read: {errors}")


class BlockPerFile(Stored):
    has_links = False


class Raw(System):
    """Run files alone, without names: what remains is the I/O."""

    flags = 0

    def start(self) -> None:
        self._headers: dict[int, mmap.mmap] = {}

    def write(self, numbers: range) -> None:
        memory = self.memory
        parts = [memory.blocks[n] for n in numbers]
        table = RunTable(
            memory.block_bytes,
            _DIGEST,
            tuple(memory.names[n] for n in numbers),
            tuple(xxhash.xxh3_64_intdigest(part) for part in parts),
        )
        header = mmap.mmap(-1, HEADER_BYTES)
        header[:] = table.encode()
        fd = os.open(self._path(numbers), os.O_WRONLY | os.O_CREAT | os.O_EXCL | self.flags, 0o666)
        try:
            if os.writev(fd, [header, *parts]) != table.file_bytes:
                raise RuntimeError("short write")
        finally:
            os.close(fd)

    def read(self, numbers: range) -> None:
        fd = os.open(self._path(numbers), os.O_RDONLY | self.flags)
        try:
            header = mmap.mmap(-1, HEADER_BYTES)
            os.preadv(fd, [header], 0)
            table = RunTable.decode(bytes(header), os.fstat(fd).st_size)
            if not all(read_blocks(fd, table, 0, [self.memory.blocks[n] for n in numbers])):
                raise RuntimeError("a checksum differs")
        finally:
            os.close(fd)

    def _path(self, numbers: range) -> Path:
        return self.folder / f"{numbers.start}.run"


class Direct(Raw):
    flags = os.O_DIRECT


class Nixl(Raw):
    """NIXL's POSIX backend on the same files, from one thread: it has several of a slice's blocks in flight itself."""

    def start(self) -> None:
        from kv_store.nixl.agent import load_library

        library = load_library()
        self._agent: Any = library.nixl_agent("bench", library.nixl_agent_config(backends=["POSIX"]))
        view = memoryview(self.memory.map)
        import numpy as np

        self._address = int(np.frombuffer(view, dtype=np.uint8).ctypes.data)
        self._agent.register_memory([(self._address, self.memory.num_bytes, 0, "")], "DRAM")

    def write(self, numbers: range) -> None:
        memory = self.memory
        names = tuple(memory.names[n] for n in numbers)
        checksums = tuple(xxhash.xxh3_64_intdigest(memory.blocks[n]) for n in numbers)
        fd = os.open(self._path(numbers), os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            os.pwrite(fd, RunTable(memory.block_bytes, _DIGEST, names, checksums).encode(), 0)
            self._transfer("WRITE", fd, numbers)
        finally:
            os.close(fd)

    def read(self, numbers: range) -> None:
        fd = os.open(self._path(numbers), os.O_RDWR)
        try:
            table = RunTable.decode(os.pread(fd, HEADER_BYTES, 0), os.fstat(fd).st_size)
            self._transfer("READ", fd, numbers)
        finally:
            os.close(fd)
        blocks = [self.memory.blocks[n] for n in numbers]
        if [xxhash.xxh3_64_intdigest(block) for block in blocks] != list(table.checksums):
            raise RuntimeError("a checksum differs")

    def _transfer(self, operation: str, fd: int, numbers: range) -> None:
        size = self.memory.block_bytes
        agent = self._agent
        registered = agent.register_memory([(0, HEADER_BYTES + len(numbers) * size, fd, "")], "FILE")
        memory = agent.get_xfer_descs([(self._address + n * size, size, 0) for n in numbers], "DRAM")
        files = [(HEADER_BYTES + position * size, size, fd) for position in range(len(numbers))]
        handle = agent.initialize_xfer(operation, memory, agent.get_xfer_descs(files, "FILE"), agent.name)
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        if state != "DONE":
            raise RuntimeError(f"NIXL: {state}")
        agent.release_xfer_handle(handle)
        agent.deregister_memory(registered)


_SYSTEMS: dict[str, type[System]] = {
    "block files": BlockPerFile, "runs": Stored, "raw runs": Raw, "raw O_DIRECT": Direct, "raw NIXL": Nixl,
}  # fmt: skip


def _each(paths: Sequence[Path], action: Callable[[int], None]) -> None:
    for path in paths:
        fd = os.open(path, os.O_RDWR)
        try:
            action(fd)
        finally:
            os.close(fd)


def _measure(name: str, args: argparse.Namespace, num_threads: int) -> Mapping[str, float]:
    """Each in a process of its own: NIXL's threads and settings must not touch the others."""
    command = [
        sys.executable, "-m", "bench.store", "--one", name, "--dir", str(args.dir), "--threads", str(num_threads),
        "--block-kb", str(args.block_kb), "--total-mb", str(args.total_mb), "--slice-mb", str(args.slice_mb),
    ]  # fmt: skip
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def _run_one(args: argparse.Namespace) -> None:
    block_bytes = args.block_kb * 1024
    slice_blocks = max(1, int(args.slice_mb * 2**20) // block_bytes)
    memory = Memory(args.total_mb * 2**20 // block_bytes, block_bytes, slice_blocks)
    print(json.dumps(_SYSTEMS[args.one](args.dir / "bench-store", memory, args.threads[0]).measure()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True, help="an existing folder on the file system to measure")
    parser.add_argument("--block-kb", type=int, default=360, help="KiB of one block, a multiple of 12")
    parser.add_argument("--total-mb", type=int, default=512)
    parser.add_argument("--slice-mb", type=float, default=RUN_BYTES / 2**20, help="MiB of one run file")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--systems", nargs="+", choices=_SYSTEMS, default=list(_SYSTEMS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", choices=_SYSTEMS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.block_kb * 1024 % _LAYER_BYTES:
        parser.error(f"--block-kb: {args.block_kb} is no multiple of {_LAYER_BYTES // 1024}")
    if args.one:
        _run_one(args)
        return
    systems: dict[str, Callable[[], Mapping[str, float]]] = {}
    for name in args.systems:
        # NIXL's agents are for one thread.
        for num_threads in args.threads if name != "raw NIXL" else [1]:
            systems[f"{name}, {num_threads} thr."] = partial(_measure, name, args, num_threads)
    rows: dict[str, Row] = {}
    for figure, row in interleave(systems, args.repeats).items():
        for system, measured in row.items():
            rows.setdefault(system, {})[figure] = measured
    title = f"{args.total_mb} MiB in blocks of {args.block_kb} KiB, runs of {args.slice_mb:g} MiB, in {args.dir}"
    print_table(title, rows)
    if args.json:
        write_json(args.json, rows)


if __name__ == "__main__":
    main()
