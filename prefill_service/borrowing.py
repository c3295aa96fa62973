"""Blocks that a prefill reads from its decode worker's cache: asks for them, checks the answers, counts the blocks that
came.

The decode worker is another process, maybe of another version, maybe one that was taken over. Whatever it does wrong,
only its own request loses the borrowed blocks, and computes them.
"""

from __future__ import annotations

import asyncio
import logging

from common import metrics
from common.errors import InvalidArgumentError, TransferError
from engine import messages as m
from protos.baton.v1 import prefill_pb2
from worker.engine_stream import EngineStream
from worker.published_blocks import MAX_PEER_BYTES, PublishedBlocks

log = logging.getLogger(__name__)


class Borrowing:
    """The loan of one prefill, which asks at most once. Call all methods from the same event loop."""

    def __init__(self, stream: EngineStream, peer: bytes, timeout_s: float) -> None:
        """`timeout_s`: how long the engine waits for an answer. Raises `InvalidArgumentError`."""
        if len(peer) > MAX_PEER_BYTES:
            raise InvalidArgumentError("peer", f"{len(peer)} bytes are too many")
        self.num_read = 0  # blocks
        self._stream = stream
        self._peer = peer
        self._timeout_s = timeout_s
        self._lent = PublishedBlocks("lent", ())
        self._asked: range = range(0)
        self._timer: asyncio.TimerHandle | None = None
        self._is_late = False

    def ask(self, needed: m.LoanNeeded) -> prefill_pb2.PrefillEvent:
        """The message that asks the decode worker."""
        self._asked = range(needed.first, needed.stop)
        self._lent = PublishedBlocks("lent", self._asked)
        self._stream.send(m.AddPeer(self._peer))
        self._timer = asyncio.get_running_loop().call_later(self._timeout_s, self._give_up)
        wanted = prefill_pb2.BlocksWanted(first=needed.first, stop=needed.stop)
        return prefill_pb2.PrefillEvent(wanted=wanted)

    def take_in(self, ready: prefill_pb2.BlocksReady) -> None:
        """Takes in an answer. Raises `InvalidArgumentError` if it breaks a rule."""
        if self._is_late:
            return
        try:
            published = self._lent.take_in(self._stream.engine_id, ready)
        except TransferError as error:
            raise InvalidArgumentError("lent", error.message) from None
        metrics.worker_kv_blocks_lent.labels("failed").inc(len(published.failed_indexes))
        self._stream.send(published)
        if not self._lent.due:
            self.end()

    def count(self, fetched: m.BlocksFetched) -> None:
        """Counts blocks that arrived or failed, borrowed ones and those of the store."""
        num_read = sum(index in self._asked for index in fetched.indexes)
        num_failed = sum(index in self._asked for index in fetched.failed_indexes)
        self.num_read += num_read
        metrics.worker_kv_blocks_lent.labels("read").inc(num_read)
        metrics.worker_kv_blocks_lent.labels("failed").inc(num_failed)

    def end(self) -> None:
        """Waits for nothing more."""
        if self._timer is not None:
            self._timer.cancel()

    def _give_up(self) -> None:
        self._is_late = True
        unsaid = sorted(self._lent.due)
        metrics.worker_kv_blocks_lent.labels("failed").inc(len(unsaid))
        failure = f"the decode worker did not lend it within {self._timeout_s:g} s"
        self._stream.send(m.RemoteBlocksPublished(self._stream.engine_id, [], unsaid, failure))
