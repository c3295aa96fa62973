"""A NIXL worker in a process of its own, for tests that kill, stop and restart it.

python -m tests.kv_store.peer_process serve NUM_BLOCKS EPOCH [DEVICE STAGING]
                                                      publishes every block, answers each line with "pong"
python -m tests.kv_store.peer_process relay NUM_BLOCKS
                                                      stages all blocks, with room for an eighth; a line announces each
python -m tests.kv_store.peer_process read PEER       reads all blocks of PEER (hex), again and again
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec

from kv_store.base import BlockRef, ConnectorConfig, FetchBlock, LocalBlock
from kv_store.nixl.connector import NixlConnector
from tests.kv_store.blocks import SPEC, name_of
from tests.kv_store.conformance import Worker

BIG_SPEC = replace(SPEC, num_layers=32, num_kv_heads=8, head_dim=64, block_size=16)  # 1 MiB per block


RELAY_SEED = 77


class Published(msgspec.Struct):
    peer: bytes
    refs: list[BlockRef]


def make_worker(
    name: str,
    num_blocks: int,
    *,
    epoch: str = "e1",
    seed: int = 1,
    timeout_s: float = 60.0,
    checksums: bool = False,
    device: str = "cpu",
    staging: str = "auto",
    staging_blocks: int = 256,
) -> Worker:
    config = ConnectorConfig(
        worker_id=name,
        epoch=epoch,
        transfer_timeout_s=timeout_s,
        verify_checksums=checksums,
        section={"nixl_staging": staging, "nixl_staging_gb": staging_blocks * BIG_SPEC.block_bytes / 2**30},
    )
    return Worker(NixlConnector(config), num_blocks, BIG_SPEC, seed, device)


def seed_of(epoch: str) -> int:
    """Of what a serving process has in its cache."""
    return len(epoch) + ord(epoch[-1])


class PeerProcess:
    """The other end of `main`."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.kv_store.peer_process", *arguments],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=dict(os.environ),
        )

    def line(self) -> bytes:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def published(self) -> Published:
        return msgspec.msgpack.decode(bytes.fromhex(self.line().decode()), type=Published)

    def is_running_again(self) -> bool:
        """Waits until the process has run on after this call; False if it has ended instead."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(b"ping\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return False
        return self.line() == b"pong"

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):  # of a ping that was never read
                    pipe.close()


def main(mode: str, *arguments: str) -> None:
    if mode == "serve":
        num_blocks, epoch = int(arguments[0]), arguments[1]
        device, staging = arguments[2:] or ("cpu", "auto")
        worker = make_worker(
            "peer", num_blocks, epoch=epoch, seed=seed_of(epoch), checksums=True, device=device, staging=staging
        )
        refs = worker.published({block_id: name_of(block_id) for block_id in range(num_blocks)})
        print(msgspec.msgpack.encode(Published(worker.connector.describe(), refs)).hex(), flush=True)
        for _ in sys.stdin:
            print("pong", flush=True)
    elif mode == "relay":
        num_blocks = int(arguments[0])
        worker = make_worker("peer", num_blocks, seed=RELAY_SEED, staging="always", staging_blocks=num_blocks // 8)
        print(worker.connector.describe().hex(), flush=True)
        worker.publish([LocalBlock(block_id, block_id, name_of(block_id)) for block_id in range(num_blocks)])
        num_announced = 0
        while num_announced < num_blocks:
            worker.woken.wait(60)
            for result in worker.poll():
                assert result.ref is not None, result.error
                num_announced += 1
                print(msgspec.msgpack.encode([result.ref]).hex(), flush=True)
        sys.stdin.read()
    else:
        published = msgspec.msgpack.decode(bytes.fromhex(arguments[0]), type=Published)
        worker = make_worker("reader", len(published.refs))
        worker.connector.add_peer(published.peer)
        while True:
            worker.fetch([FetchBlock(ref, ref.index) for ref in published.refs])
            print("reading", flush=True)
            worker.results()
    worker.connector.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
