"""What a prefill worker may say on one stream, and what it may not: it is another process, maybe of another version,
maybe one that was taken over. Whatever breaks a rule ends the stream like any other failure, before the engine, which
other requests share, has seen it. The engine compares the blocks' names: it has those of the prompt
(`engine.remote_kv`).
"""

from __future__ import annotations

from common.errors import TransferError
from common.sampling import MAX_LOGPROBS
from common.types import SampledToken
from engine import messages as m
from protos.baton.v1 import prefill_pb2
from protos.convert import token_of
from worker import convert

MAX_PEER_BYTES = 1 << 20  # of a connector's description: addresses and keys, some KiB
MAX_NAME_CHARS = 1024
MAX_NUMBERS = 4096  # of one reference: a checksum for each KV head, a slot for each rank
MAX_FAILURE_CHARS = 500


class PrefillEvents:
    """Takes in the events of one stream, in order. Raises `TransferError` for what must not be."""

    def __init__(self, *, first_block: int, num_blocks: int, vocab_size: int) -> None:
        self._due = set(range(first_block, num_blocks))  # blocks that nothing has been said of
        self._vocab_size = vocab_size
        self._is_accepted = False
        self._has_first_token = False

    def peer(self, accepted: prefill_pb2.PrefillAccepted) -> bytes:
        """The worker's connector; empty if blocks don't come from its memory."""
        if self._is_accepted:
            raise TransferError("accepted: came twice")
        if len(accepted.peer) > MAX_PEER_BYTES:
            raise TransferError(f"accepted.peer: {len(accepted.peer)} bytes are too many")
        self._is_accepted = True
        return accepted.peer

    def announced(self, engine_id: str, ready: prefill_pb2.BlocksReady) -> m.BlocksAnnounced:
        for block in ready.blocks:
            self._take(block.index, "blocks_ready.blocks")
            if max(len(block.peer), len(block.epoch)) > MAX_NAME_CHARS:
                raise TransferError("blocks_ready.blocks: the name of its peer or epoch is too long")
            if max(len(block.checksums), len(block.staged_slots)) > MAX_NUMBERS:
                raise TransferError("blocks_ready.blocks: too many checksums or slots")
        for index in ready.failed_indexes:
            self._take(index, "blocks_ready.failed_indexes")
        refs = [convert.block_ref(block) for block in ready.blocks]
        return m.BlocksAnnounced(engine_id, refs, list(ready.failed_indexes), ready.failure[:MAX_FAILURE_CHARS])

    def first_token(self, first: prefill_pb2.FirstToken) -> SampledToken:
        if self._has_first_token:
            raise TransferError("first_token: came twice")
        token = token_of(first.token)
        if len(token.top_logprobs) > MAX_LOGPROBS:
            raise TransferError(f"first_token.token.top_logprobs: {len(token.top_logprobs)} are too many")
        for name, token_id in (
            ("token_id", token.token_id),
            *(("top_logprobs", t.token_id) for t in token.top_logprobs),
        ):
            if token_id >= self._vocab_size:
                raise TransferError(f"first_token.token.{name}: {token_id} is outside the vocabulary")
        self._has_first_token = True
        return token

    def _take(self, index: int, field: str) -> None:
        if index not in self._due:
            raise TransferError(f"{field}: block {index} was not asked for, or was announced before")
        self._due.remove(index)
