"""A prefill worker that says what a test tells it to, for tests of decode workers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc

from common.errors import BatonError
from common.grpc.options import MAX_MESSAGE_BYTES, worker_server_options
from common.grpc.status import status_details
from protos.baton.v1 import prefill_pb2, prefill_pb2_grpc, types_pb2

ACCEPTED = prefill_pb2.PrefillEvent(accepted=prefill_pb2.PrefillAccepted(worker_id="p", epoch="e"))


class FakePrefillWorker(prefill_pb2_grpc.PrefillServiceServicer):
    def __init__(
        self, events: Sequence[prefill_pb2.PrefillEvent] = (ACCEPTED,), refuses: BatonError | None = None
    ) -> None:
        """Each stream begins with `events`, or ends with the error."""
        self.address = ""
        self.num_asked = 0
        self.heard: list[prefill_pb2.PrefillRequest] = []
        self.has_ended = False
        self._events = events
        self._refuses = refuses
        self._says: asyncio.Queue[prefill_pb2.PrefillEvent | None] = asyncio.Queue()

    def says(self, **event: object) -> None:
        self._says.put_nowait(prefill_pb2.PrefillEvent(**event))  # type: ignore[arg-type]

    def gives(self, *indexes: int, token: int | None = None) -> None:
        """Blocks, with the first token if `token` is its id."""
        refs = [types_pb2.BlockRef(index=index, block_hash=bytes(16)) for index in indexes]
        ready = prefill_pb2.BlocksReady(blocks=refs)
        if token is not None:
            first = types_pb2.SampledToken(token_id=token)
            self.says(first_token=prefill_pb2.FirstToken(token=first, blocks_ready=ready))
        else:
            self.says(blocks_ready=ready)

    def fails(self) -> None:
        self._says.put_nowait(None)

    def heard_of(self, kind: str) -> list[prefill_pb2.PrefillRequest]:
        return [message for message in self.heard if message.HasField(kind)]  # type: ignore[arg-type]

    async def Prefill(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]  # noqa: N802
        self.num_asked += 1
        if (error := self._refuses) is not None:
            code = grpc.StatusCode[error.grpc_code]
            await context.abort(code, error.message, trailing_metadata=status_details(error))
        for event in self._events:
            await context.write(event)
        speaking = asyncio.create_task(self._speak(context))
        try:
            async for message in request_iterator:
                self.heard.append(message)
        finally:
            speaking.cancel()
            self.has_ended = True

    async def _speak(self, context: Any) -> None:
        while (event := await self._says.get()) is not None:
            await context.write(event)
        await context.abort(grpc.StatusCode.INTERNAL, "it was told to fail")


@asynccontextmanager
async def prefill_workers(*workers: FakePrefillWorker) -> AsyncIterator[list[FakePrefillWorker]]:
    """Serves each at an address of its own."""
    options = worker_server_options(max_message_bytes=MAX_MESSAGE_BYTES, max_streams=100)
    servers = [grpc.aio.server(options=options) for _ in workers]
    for server, worker in zip(servers, workers, strict=True):
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server(worker, server)
        worker.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
    try:
        yield list(workers)
    finally:
        for server in servers:
            await server.stop(None)
