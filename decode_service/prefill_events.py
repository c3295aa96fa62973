"""Checks what a prefill worker says on one stream. The worker is another process, maybe of another version, maybe taken
over. An event that breaks a rule ends the stream like any other failure, before the engine, which other requests share,
has seen it.
"""

from __future__ import annotations

from common.errors import TransferError
from common.sampling import MAX_LOGPROBS
from common.types import SampledToken
from engine import messages as m
from protos.baton.v1 import prefill_pb2
from protos.convert import token_of
from worker.published_blocks import MAX_PEER_BYTES, PublishedBlocks


class PrefillEvents:
    """Takes in the events of one stream, in order. Raises `TransferError` for an event that breaks a rule."""

    def __init__(
        self, *, first_block: int, num_blocks: int, vocab_size: int, num_lendable: int, has_token: bool = True
    ) -> None:
        """`num_blocks`: up to the last one that was asked for. `num_lendable`: leading blocks that are lent to the
        worker if it asks. `has_token`: it was asked for the whole prompt, and so for its first token."""
        self._has_token = has_token
        self._published = PublishedBlocks("blocks_ready", range(first_block, num_blocks))
        self._num_lendable = num_lendable
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

    def published(self, engine_id: str, ready: prefill_pb2.BlocksReady) -> m.RemoteBlocksPublished:
        return self._published.take_in(engine_id, ready)

    def wanted(self, engine_id: str, wanted: prefill_pb2.BlocksWanted) -> m.LendBlocks:
        if not wanted.first < wanted.stop <= self._num_lendable:
            raise TransferError(f"wanted: blocks {wanted.first} to {wanted.stop} of {self._num_lendable} that are lent")
        self._num_lendable = 0
        return m.LendBlocks(engine_id, wanted.first, wanted.stop)

    def first_token(self, first: prefill_pb2.FirstToken) -> SampledToken | None:
        """None: the part that was asked for is computed."""
        if self._has_first_token:
            raise TransferError("first_token: came twice")
        if first.HasField("token") is not self._has_token:
            raise TransferError(f"first_token.token: is {'missing' if self._has_token else 'there, of a part'}")
        if not self._has_token:
            self._has_first_token = True
            return None
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
