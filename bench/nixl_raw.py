"""What NIXL itself reads between two processes: the figure that the `nixl` connector is measured against.

    python -m bench.nixl_raw [--num-blocks 64] [--block-kib 1024] [--tcp] [--repeats 5]

The producer is a process of its own that holds the blocks and does nothing; the consumer, in the calling process,
prepares one transfer of all blocks, once, and runs it again and again. Nothing of Baton is in between: no checks, no
jobs, no slices. The environment decides on the transport (`UCX_TLS=tcp`), as it does for the connector.

    with RawNixlReads(num_blocks=64, block_bytes=1 << 20) as raw:
        for _ in range(repeats):
            seconds = raw.read()            # in turns with whatever it is compared with
        print(raw.num_bytes / seconds / 1e9, "GB/s")
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Self

import numpy as np

from common.errors import TransferError
from kv_store.nixl.agent import load_library

GIVE_UP_S = 60.0  # for one read


class RawNixlReads:
    """A producer process with `num_blocks` blocks of `block_bytes`, and one prepared read of them.

    `remote_ids[i]` is read into `local_ids[i]`; left out, all blocks in their order (which NIXL then merges into one
    run, so give the ids that the other side of a comparison uses). Raises `StartupError` if NIXL is missing,
    `TransferError` if a read fails, takes too long, or brings the wrong bytes.
    """

    def __init__(
        self,
        num_blocks: int,
        block_bytes: int,
        *,
        remote_ids: Sequence[int] | None = None,
        local_ids: Sequence[int] | None = None,
    ) -> None:
        self._remote_ids = np.asarray(range(num_blocks) if remote_ids is None else remote_ids, dtype=np.int32)
        self._local_ids = np.asarray(range(num_blocks) if local_ids is None else local_ids, dtype=np.int32)
        if len(self._remote_ids) != len(self._local_ids):
            raise ValueError("remote_ids and local_ids differ in length")
        self.num_bytes = len(self._local_ids) * block_bytes
        library = load_library()
        self._producer = subprocess.Popen(
            [sys.executable, "-m", "bench.nixl_raw", "--serve", str(num_blocks), str(block_bytes)],
            cwd=Path(__file__).parents[1],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        try:
            self._agent, self._cache = _agent_with_blocks(library, num_blocks, block_bytes, is_producer=False)
            self._cache.fill(0)
            assert self._producer.stdout is not None
            described = json.loads(self._producer.stdout.readline())
            peer = self._agent.add_remote_agent(base64.b64decode(described["metadata"]))
            self._local = self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", _rows(self._cache), "DRAM")
            remote = _rows(self._cache, described["address"])
            self._remote = self._agent.prep_xfer_dlist(peer, remote, "DRAM")
            self._transfer = self._agent.make_prepped_xfer(
                "READ", self._local, self._local_ids, self._remote, self._remote_ids
            )
            self.read()  # connects
            self._check()
        except BaseException:
            self.close()
            raise

    def read(self) -> float:
        """Reads all blocks once; seconds from posting to the last byte."""
        start = time.perf_counter()
        try:
            state = self._agent.transfer(self._transfer)
            while state == "PROC":
                if time.perf_counter() - start > GIVE_UP_S:
                    raise TransferError(f"NIXL: a read is not done after {GIVE_UP_S} s")
                state = self._agent.check_xfer_state(self._transfer)
        except TransferError:
            raise
        except Exception as error:
            raise TransferError(f"NIXL: {type(error).__name__}: {error}") from error
        seconds = time.perf_counter() - start
        if state != "DONE":
            raise TransferError(f"NIXL: state {state}")
        return seconds

    def close(self) -> None:
        self._transfer = self._local = self._remote = self._agent = None
        self._producer.kill()
        self._producer.wait()
        for pipe in (self._producer.stdin, self._producer.stdout):
            if pipe is not None:
                pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check(self) -> None:
        for remote_id, local_id in zip(self._remote_ids, self._local_ids, strict=True):
            if not np.array_equal(self._cache[local_id], _pattern(int(remote_id), self._cache.shape[1])):
                raise TransferError(f"NIXL: block {remote_id} did not arrive whole")


def _pattern(block_id: int, block_bytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(block_id).integers(0, 256, block_bytes, dtype=np.uint8)


def _agent_with_blocks(library: ModuleType, num_blocks: int, block_bytes: int, *, is_producer: bool) -> tuple[Any, Any]:
    """An agent, and the `[num_blocks, block_bytes]` uint8 that it has registered. The consumer makes its own progress,
    which is faster (see `kv_store.nixl.agent`)."""
    config = library.nixl_agent_config(
        enable_prog_thread=is_producer,
        backends=["UCX"],
        sync_mode=library.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
    )
    agent = library.nixl_agent(f"raw-{uuid.uuid4().hex}", config)
    cache = np.empty((num_blocks, block_bytes), dtype=np.uint8)
    agent.register_memory([(cache.ctypes.data, cache.nbytes, 0, "")], "DRAM")
    return agent, cache


def _rows(cache: np.ndarray[Any, Any], address: int | None = None) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """`[num_blocks, 3]`: address, length and device of each block, from `address` on."""
    num_blocks, block_bytes = cache.shape
    rows = np.zeros((num_blocks, 3), dtype=np.uint64)
    start = cache.ctypes.data if address is None else address
    rows[:, 0] = start + np.arange(num_blocks, dtype=np.uint64) * np.uint64(block_bytes)
    rows[:, 1] = block_bytes
    return rows


def _serve(num_blocks: int, block_bytes: int) -> None:
    agent, cache = _agent_with_blocks(load_library(), num_blocks, block_bytes, is_producer=True)
    for block_id in range(num_blocks):
        cache[block_id] = _pattern(block_id, block_bytes)
    metadata = base64.b64encode(agent.get_agent_metadata()).decode()
    print(json.dumps({"metadata": metadata, "address": cache.ctypes.data}), flush=True)
    sys.stdin.read()  # until the consumer ends


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-blocks", type=int, default=64)
    parser.add_argument("--block-kib", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tcp", action="store_true", help="between hosts, so to speak")
    parser.add_argument("--serve", nargs=2, type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        _serve(*args.serve)
        return
    if args.tcp:
        os.environ["UCX_TLS"] = "tcp"
    with RawNixlReads(args.num_blocks, args.block_kib << 10) as raw:
        seconds = statistics.median(raw.read() for _ in range(args.repeats))
    print(f"{raw.num_bytes / seconds / 1e9:.2f} GB/s")


if __name__ == "__main__":
    main()
