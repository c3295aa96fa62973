"""Requests that wait for what the store says about their prompts. Pure: it asks, and never waits."""

from __future__ import annotations

from engine.blocks.block_manager import BlockManager
from engine.request import Request
from kv_store.base import KVConnector, Lookup


class PendingLookups:
    def __init__(self, store: KVConnector, blocks: BlockManager) -> None:
        self._store = store
        self._blocks = blocks
        self.waiting: dict[str, tuple[Request, Lookup]] = {}  # by request id, in the order of arrival

    def __len__(self) -> int:
        return len(self.waiting)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(request.num_prompt_tokens for request, _ in self.waiting.values())

    def start(self, request: Request) -> None:
        """Asks the store for the prompt's leading blocks, if the cache here does not hold all that could be found."""
        names = self._blocks.cache.findable(request)
        is_useful = self._blocks.find_prefix(request) < len(names)
        self.waiting[request.request_id] = request, self._store.start_lookup(names) if is_useful else Lookup(0)

    def drop(self, request_id: str) -> None:
        self.waiting.pop(request_id, None)

    def take_answered(self) -> list[Request]:
        """Requests whose answer is there, in the order of their arrival."""
        answered = [(request, lookup) for request, lookup in self.waiting.values() if lookup.num_blocks is not None]
        for request, lookup in answered:
            del self.waiting[request.request_id]
            request.num_stored_blocks = lookup.num_blocks or 0
            if lookup.is_certain:  # a block that is here and was stored may be gone from there
                self._blocks.write_back.recheck(self._blocks.cache.findable(request)[request.num_stored_blocks :])
        return [request for request, _ in answered]
