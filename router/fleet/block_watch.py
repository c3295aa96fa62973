"""Keeps the router's index of each worker's KV blocks current. What a worker says is checked: a worker that says
something impossible is not followed, and costs no other worker anything.
"""

from __future__ import annotations

import asyncio
import logging

import grpc

from common import metrics
from common.block_hash import HASH_BYTES
from common.grpc.streams import uncancelled
from protos.baton.v1 import worker_pb2, worker_pb2_grpc
from router.fleet.patience import PATIENCE, Patience
from router.fleet.prefix_index import PrefixIndex

log = logging.getLogger(__name__)

SLICE_BLOCKS = 2**12  # taken in before others get their turn
SWEEP_BLOCKS = 2**12
SWEEP_S = 0.1


class FalseBlocksError(Exception):
    """The worker said something impossible."""


class BlockWatch:
    """One for each router. Its index only has workers that are followed."""

    def __init__(self, patience: Patience = PATIENCE) -> None:
        self.index = PrefixIndex()
        self._retry_s = patience.block_retry_s

    async def follow(self, address: str, epoch: str, stub: worker_pb2_grpc.WorkerServiceAsyncStub) -> None:
        """Follows a worker until this is cancelled, or the worker proves too old or says something impossible; then
        forgets its blocks. Begins a stream anew if it breaks or lacks a message."""
        try:
            while True:
                reason = await self._read(address, epoch, stub)
                metrics.router_block_resyncs.inc()
                log.info("a worker's blocks are asked for anew", extra={"address": address, "reason": reason})
                await asyncio.sleep(self._retry_s)
        except FalseBlocksError as error:
            metrics.router_false_workers.labels("blocks").inc()
            log.error("a worker says what cannot be", extra={"address": address, "reason": str(error)})
        except grpc.aio.AioRpcError as error:
            log.info("a worker tells of no blocks", extra={"address": address, "reason": error.code().name})
        except Exception:  # requests are served without knowing this worker's blocks
            log.exception("following a worker's blocks failed", extra={"address": address})
        finally:
            self.index.forget(address)

    async def sweep(self) -> None:
        """Runs for ever: frees the entries of workers that are gone."""
        while True:
            metrics.router_known_blocks.set(len(self.index))
            await asyncio.sleep(0.0 if self.index.sweep(SWEEP_BLOCKS) else SWEEP_S)

    async def _read(self, address: str, epoch: str, stub: worker_pb2_grpc.WorkerServiceAsyncStub) -> str:
        """Reads one stream. Returns why it has to be begun anew."""
        call = stub.WatchBlocks(worker_pb2.WatchBlocksRequest())
        sequence: int | None = None
        try:
            while isinstance(changes := await uncancelled(call.read()), worker_pb2.BlockChanges):
                if changes.epoch != epoch:
                    return "another process answers"
                if changes.starts_list:
                    self.index.reset(address)
                elif sequence is None or changes.sequence not in (sequence, sequence + 1):
                    return f"message {changes.sequence} came after {sequence}"
                sequence = changes.sequence
                await self._take_in(address, changes)
            return "the stream ended"
        except grpc.aio.AioRpcError as error:
            if error.code() in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.PERMISSION_DENIED):
                raise
            return f"{error.code().name}: {error.details()}"
        finally:
            call.cancel()

    async def _take_in(self, address: str, changes: worker_pb2.BlockChanges) -> None:
        size = SLICE_BLOCKS * HASH_BYTES
        if len(changes.stored) % HASH_BYTES or len(changes.removed) % HASH_BYTES:
            raise FalseBlocksError(f"sends names of blocks that have not {HASH_BYTES} bytes each")
        for start in range(0, len(changes.removed), size):
            self.index.remove(address, changes.removed[start : start + size])
            await asyncio.sleep(0)
        for start in range(0, len(changes.stored), size):
            if not self.index.store(address, changes.stored[start : start + size]):
                raise FalseBlocksError("says that it has more blocks than any worker")
            await asyncio.sleep(0)
