"""Carries out hints about this worker's caches, by names of blocks: each tier does its part, and one event reports all
parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine import messages as m
from engine.blocks.block_manager import BlockManager
from engine.remote_kv import RemoteKV
from kv_store.base import Eviction

STORE_TIMEOUT_S = 5.0  # until an eviction is answered without the store's part in it


@dataclass(slots=True)
class _Evicting:
    call_id: int
    num_device_blocks: int
    num_host_blocks: int
    stored: Eviction
    give_up: float  # on the caller's clock


class CacheHints:
    def __init__(self, blocks: BlockManager, remote_kv: RemoteKV, emit: Callable[[m.Event], None]) -> None:
        self._blocks = blocks
        self._remote_kv = remote_kv
        self._emit = emit
        self.evicting: list[_Evicting] = []  # not answered yet

    def handle(self, hint: m.HintCache, now: float) -> None:
        blocks, names = self._blocks, hint.block_hashes
        if hint.action is m.CacheAction.PREFETCH:
            self._remote_kv.prefetch(hint.call_id, hint.tenant, names, now)
            return
        if hint.action is m.CacheAction.FLUSH:
            num_device, num_host = blocks.named.evict(list(blocks.names()))
            self._emit(m.CacheHinted(call_id=hint.call_id, num_device_blocks=num_device, num_host_blocks=num_host))
            return
        if hint.action is m.CacheAction.EVICT:
            num_device, num_host = blocks.named.evict(names)
            stored = self._remote_kv.evict_stored(names)
            self.evicting.append(_Evicting(hint.call_id, num_device, num_host, stored, now + STORE_TIMEOUT_S))
            self.report(now)
            return
        num_device, num_host = blocks.named.count_here(names)
        if hint.seconds > 0:
            blocks.named.retain(hint.tenant, names, hint.seconds)
        else:
            blocks.named.end_retention(hint.tenant, names)
        self._emit(m.CacheHinted(call_id=hint.call_id, num_device_blocks=num_device, num_host_blocks=num_host))

    def report(self, now: float) -> None:
        """Answers evictions that the store has carried out, or that took it too long."""
        waiting = []
        for one in self.evicting:
            num_stored, failure = one.stored.num_blocks, one.stored.failure
            if num_stored is None and now < one.give_up:
                waiting.append(one)
                continue
            if num_stored is None:
                num_stored, failure = 0, f"the store did not answer within {STORE_TIMEOUT_S:g} s"
            self._emit(
                m.CacheHinted(
                    call_id=one.call_id,
                    num_device_blocks=one.num_device_blocks,
                    num_host_blocks=one.num_host_blocks,
                    num_stored_blocks=num_stored,
                    failure=failure,
                )
            )
        self.evicting = waiting
