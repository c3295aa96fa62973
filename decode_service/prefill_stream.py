"""One stream to one prefill worker, from its start to its end. The stream is the lease on what the worker publishes.

However the request ends, this end sends `release` and half-closes. If the stream just broke off, the prefill worker
could not know what is still being read, and would keep the blocks for a while.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable

import grpc

from common.errors import TransferError
from common.grpc.streams import MessageStream
from decode_service.prefill_events import PrefillEvents
from protos.baton.v1 import prefill_pb2, prefill_pb2_grpc
from worker.shell import Worker

log = logging.getLogger(__name__)

END_WAIT_S = 2.0  # for a prefill worker to end the stream; it does so at once


class PrefillStream:
    """`task` ends when the stream ends. Its result is an error if the call failed or the worker broke a rule. Call all
    methods from the same event loop."""

    def __init__(
        self,
        worker: Worker,
        address: str,
        start: prefill_pb2.PrefillStart,
        events: PrefillEvents,
        take_in: Callable[[PrefillStream, prefill_pb2.PrefillEvent], None],
        timeout: float | None,
    ) -> None:
        """Opens the stream. `take_in` gets each event that comes before the release, and may raise `TransferError`.
        `timeout`: seconds that the whole stream may take."""
        self.address = address
        self.events = events
        self.is_released = False
        self._worker = worker
        self._request_id = start.request_id
        self._take_in = take_in
        self._outbox: asyncio.Queue[prefill_pb2.PrefillRequest | None] = asyncio.Queue()
        self.send(prefill_pb2.PrefillRequest(start=start))
        self.task = asyncio.create_task(self._run(timeout))

    def send(self, message: prefill_pb2.PrefillRequest) -> None:
        """Sends a message. After the release or the end, nobody reads it."""
        self._outbox.put_nowait(message)

    def release(self) -> None:
        """Tells the worker that none of its blocks is read any more: they are free, and the worker ends the stream."""
        if not self.is_released:
            self.is_released = True
            self.send(prefill_pb2.PrefillRequest(release=prefill_pb2.ReleaseBlocks()))
            self._outbox.put_nowait(None)

    @property
    def is_complete(self) -> bool:
        """Whether the worker has ended the stream itself."""
        task = self.task
        return task.done() and not task.cancelled() and task.exception() is None and task.result() is None

    async def end(self) -> None:
        """Call after `release`. Returns once the stream has ended; cancels it if that takes too long."""
        done, _ = await asyncio.wait((self.task,), timeout=END_WAIT_S)
        if not done:
            extra = {"request_id": self._request_id, "address": self.address}
            log.warning("a prefill worker does not end its stream, cancelling it", extra=extra)
            self.task.cancel()
            await asyncio.wait((self.task,))
        if not self.task.cancelled():
            self.task.exception()  # as nobody else may ask for it

    async def _run(self, timeout: float | None) -> grpc.aio.AioRpcError | TransferError | None:
        try:
            await self._receive(timeout)
        except (grpc.aio.AioRpcError, TransferError) as error:
            # Raised, its traceback would hold this stream, and so the task that holds the traceback: all of it, and the
            # whole leg, would wait for the garbage collector.
            return error.with_traceback(None)
        return None

    async def _receive(self, timeout: float | None) -> None:
        with self._worker.channels.calling(self.address) as channel:
            call = prefill_pb2_grpc.PrefillServiceStub(channel).Prefill(self._messages(), timeout=timeout)
            try:
                async with contextlib.aclosing(MessageStream(call, prefill_pb2.PrefillEvent)) as received:
                    async for event in received:
                        if not self.is_released:
                            self._take_in(self, event)
            finally:
                self._outbox.put_nowait(None)  # the call's own task still waits for a message
                del self._take_in  # who takes in keeps this stream: the two would wait for the garbage collector

    async def _messages(self) -> AsyncIterator[prefill_pb2.PrefillRequest]:
        """Yields messages until None. The release also acknowledges the last blocks, so they need no message of their
        own."""
        while (message := await self._outbox.get()) is not None:
            if not (self.is_released and message.HasField("received")):
                yield message
