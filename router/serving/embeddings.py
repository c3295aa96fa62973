"""The embeddings of one request, and what is told of it when it ends."""

from __future__ import annotations

import time
from collections.abc import Callable

from router.running.embedding import Embedded, Embedder, EmbedRequest
from router.running.request import Progress
from router.serving.endings import Endings


class Embeddings:
    """Shared by both interfaces of a router."""

    def __init__(self, embedder: Embedder, endings: Endings) -> None:
        self._embedder = embedder
        self._endings = endings

    async def embed(self, request: EmbedRequest, hold: Callable[[int], None]) -> list[Embedded]:
        """See `Embedder.embed`."""
        progress = Progress(queued_at=time.monotonic())
        with self._embedder.charged(request), self._endings.watching(request, progress):
            embedded = await self._embedder.embed(request, hold, progress)
            self._endings.embedded(request, progress)
        return embedded
