"""Which tensor-parallel degrees have stored anything of a layout in an LMCache server.

Most servers see one degree, and looking there for the groups of every other degree would make each miss several times
as slow. So each degree leaves a mark: a chunk that only says that the degree was there. A reader that misses a block
asks for the marks first, and remembers the answer for a while. What another degree stores for the first time is found
that much later, unless a hint names the degree.
"""

from __future__ import annotations

import hashlib
import time

from common.block_hash import HASH_BYTES
from common.types import KVCacheSpec
from kv_store.lmcache.client import LMCacheClient
from kv_store.lmcache.groups import Chunk

KNOWN_S = 1.0  # for so long an answer is believed
_MARK_BYTES = 64


class Marks:
    """Every method may wait for the server, and raises `TransferError`; any thread may call any of them."""

    def __init__(self, client: LMCacheClient, spec: KVCacheSpec) -> None:
        self._client = client
        self._model_name = f"baton-{spec.fingerprint()}{spec.layers_name}-degrees"
        self._answers: dict[int, tuple[bool, float]] = {}  # degree: whether it has a mark, time.monotonic() of that

    def has(self, tp_size: int, deadline: float) -> bool:
        """Whether workers of that degree have stored something. Asking keeps the mark from being evicted."""
        known = self._known(tp_size)
        if known is None:
            known = self._client.contains(self._mark(tp_size), deadline)
            self._answers[tp_size] = (known, time.monotonic())
        return known

    def leave(self, tp_size: int, deadline: float) -> None:
        """Call before groups of that degree are stored. A server that has no room for the mark is asked again
        with the next group."""
        if self._known(tp_size):
            return
        mark = self._mark(tp_size)
        if self._client.contains(mark, deadline) or self._client.store(mark, lambda slot: slot.fill(0), deadline):
            self._answers[tp_size] = (True, time.monotonic())

    def _known(self, tp_size: int) -> bool | None:
        is_marked, since = self._answers.get(tp_size, (False, -KNOWN_S))
        return is_marked if time.monotonic() < since + KNOWN_S else None

    def _mark(self, tp_size: int) -> Chunk:
        name = hashlib.blake2b(f"tp{tp_size}".encode(), digest_size=HASH_BYTES).digest()
        return Chunk(self._model_name, _MARK_BYTES, name)
