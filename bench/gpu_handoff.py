"""How long it takes to read a prompt's KV blocks from another process, between caches on one device.

The producer is a process of its own, which has published all blocks and does nothing else. So this is what a decode
worker waits at most, if its request is handed over by a prefill worker on the same machine: less of it is left to do
when the prompt has been computed, since blocks are read as soon as they are announced.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

import torch

from common.errors import BatonError, TransferError
from common.types import KVCacheSpec
from kv_store.base import BlockRef, ConnectorConfig, FetchBlock, KVConnector, LocalBlock
from kv_store.registry import create_connector

GIVE_UP_S = 60.0  # for the other process, and for one read
_END_GRACE_S = 10.0


def handoff_ms(
    spec: KVCacheSpec,
    num_blocks: int,
    last_blocks: int,
    device: str,
    connector: str = "nixl",
    section: dict[str, object] | None = None,
    repeats: int = 7,
) -> tuple[float, float]:
    """Medians in milliseconds: of reading all `num_blocks`, and only the last `last_blocks` of them.

    `section` has the connector's settings. Raises `BatonError` if the connector cannot be had or a read fails,
    `TransferError` if the blocks that arrive are others."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    config = ConnectorConfig(worker_id="bench-producer", epoch=f"{os.getpid():x}", section=section or {})
    producer = context.Process(target=_serve, args=(theirs, spec, num_blocks, device, connector, config), daemon=True)
    side: _Side | None = None
    try:
        producer.start()
        theirs.close()
        side = _Side(spec, num_blocks, device, connector, config, "consumer")
        if not ours.poll(GIVE_UP_S):
            raise TransferError(f"the producer has published nothing after {GIVE_UP_S:g} s")
        try:
            message = ours.recv()
        except EOFError:
            raise TransferError("the producer ended early; its reason is above") from None
        if isinstance(message, str):
            raise TransferError(message)
        peer, refs = message
        side.connector.add_peer(peer)
        side.read(refs)
        side.check()
        whole, last = [], []
        for _ in range(repeats):
            whole.append(side.read(refs))
            last.append(side.read(refs[-last_blocks:]))
        return 1e3 * statistics.median(whole), 1e3 * statistics.median(last)
    finally:
        ours.close()  # which ends the producer
        if side is not None:
            side.connector.close()
        if producer.pid is not None:
            producer.join(_END_GRACE_S)
            if producer.is_alive():
                producer.kill()
                producer.join()


class _Side:
    """A cache, and a connector on it."""

    def __init__(
        self, spec: KVCacheSpec, num_blocks: int, device: str, connector: str, config: ConnectorConfig, name: str
    ) -> None:
        self._woken = threading.Event()
        self._job = 0
        shape = (num_blocks, *spec.block_shape)
        self.cache = torch.zeros(shape, dtype=getattr(torch, spec.dtype), device=device)
        own = ConnectorConfig(worker_id=f"bench-{name}", epoch=config.epoch, section=config.section)
        self.connector: KVConnector = create_connector(connector, own)
        self.connector.register_kv_cache(self.cache, spec, self._woken.set)

    @property
    def rows(self) -> torch.Tensor:
        """`[num_blocks, block_bytes]` uint8."""
        return self.cache.view(len(self.cache), -1).view(torch.uint8)

    def publish(self) -> list[BlockRef]:
        """All blocks, in order."""
        self._job += 1
        blocks = [LocalBlock(index, index, index.to_bytes(16, "big")) for index in range(len(self.cache))]
        self.connector.publish(self._job, blocks)
        refs = [ref for ref in self._results(len(blocks)) if ref is not None]
        return sorted(refs, key=lambda ref: ref.index)

    def read(self, refs: Sequence[BlockRef]) -> float:
        """Seconds until all of them are here."""
        self._job += 1
        start = time.perf_counter()
        self.connector.fetch(self._job, [FetchBlock(ref, ref.index) for ref in refs])
        self._results(len(refs))
        return time.perf_counter() - start

    def _results(self, count: int) -> list[BlockRef | None]:
        found: list[BlockRef | None] = []
        give_up = time.monotonic() + GIVE_UP_S
        while len(found) < count:
            for result in self.connector.poll():
                if result.error is not None:
                    raise TransferError(f"block {result.ref}: {result.error}")
                found.append(result.ref)
            if len(found) < count:
                if not self._woken.wait(max(0.0, give_up - time.monotonic())):
                    raise TransferError(f"{len(found)} of {count} blocks after {GIVE_UP_S:g} s")
                self._woken.clear()
        return found

    def check(self) -> None:
        for index, row in enumerate(self.rows):
            if not torch.equal(row, _content(index, row)):
                raise TransferError(f"block {index} does not hold what the producer has")


def _content(index: int, row: torch.Tensor) -> torch.Tensor:
    """What block `index` holds, like `row`; neighbours differ in each byte."""
    return ((torch.arange(len(row), device=row.device) + 31 * index) % 251).to(torch.uint8)


def _serve(
    pipe: Connection, spec: KVCacheSpec, num_blocks: int, device: str, connector: str, config: ConnectorConfig
) -> None:
    """Publishes all blocks and keeps them until the other end of the pipe closes."""
    try:
        side = _Side(spec, num_blocks, device, connector, config, "producer")
    except BatonError as error:
        pipe.send(error.message)
        return
    try:
        for index, row in enumerate(side.rows):
            row.copy_(_content(index, row))
        if device != "cpu":
            torch.cuda.synchronize()
        pipe.send((side.connector.describe(), side.publish()))
        pipe.recv()
    except BatonError as error:
        pipe.send(error.message)
    except (EOFError, OSError):
        return  # the other side has all that it wants
    finally:
        side.connector.close()
