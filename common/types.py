"""The nouns that every package shares. Values are frozen; all of them encode to msgpack with msgspec."""

from __future__ import annotations

import hashlib
import zlib
from dataclasses import dataclass
from enum import StrEnum

import msgspec

PRIORITY_S = 10.0  # seconds of waiting that one step of a request's priority is worth


class FinishReason(StrEnum):
    """Why a request ended, as the OpenAI API spells it."""

    STOP = "stop"  # end of sequence, a stop token or a stop string
    LENGTH = "length"  # max_tokens, or the model's context is full
    TOOL_CALLS = "tool_calls"  # the model calls tools; only a router finds that


class WorkerRole(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


class WorkerState(StrEnum):
    READY = "ready"
    DRAINING = "draining"
    UNREACHABLE = "unreachable"  # as a router sees it
    PAUSED = "paused"  # takes no new work until it is resumed


@dataclass(slots=True, frozen=True)
class TokenLogprob:
    token_id: int
    logprob: float  # natural logarithm


@dataclass(slots=True, frozen=True)
class SampledToken:
    """One generated token. `logprob` is None if logprobs were not asked for."""

    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[TokenLogprob, ...] = ()  # likeliest first


@dataclass(slots=True, frozen=True, kw_only=True)
class KVCacheSpec:
    """Shape of one KV block, and whose bytes it holds.

    The cache is one tensor `[num_blocks, num_layers, num_planes, num_kv_heads, block_size, head_dim]`. With two planes
    index 0 of the third axis is K (after rotary embedding), 1 is V; the one plane of latent attention (MLA) holds
    what both are computed from. `num_layers` and `num_kv_heads` are those of this shard.

    Ranks that are more than the KV heads share them, and have equal specs: `tp_size` counts shards that differ, not
    ranks.
    """

    model_id: str  # identity of the weights, see `common.model_files.model_identity`
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int  # tokens
    dtype: str  # "float32", "bfloat16", "float16"
    num_planes: int = 2  # K and V; 1: a latent
    tp_size: int = 1
    tp_rank: int = 0
    first_layer: int = 0  # of this shard, in the whole
    num_layers_of_whole: int | None = None  # None: this shard has all layers

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return {"float32": 4, "bfloat16": 2, "float16": 2}[self.dtype]

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales of one head's elements in one block and plane: no dtype has any."""
        return 0

    @property
    def head_bytes(self) -> int:
        """Bytes of one head in one plane of one layer of one block."""
        return self.block_size * self.head_dim * self.itemsize + self.scale_bytes

    @property
    def plane_bytes(self) -> int:
        """Bytes of K, or of V, of one layer of one block."""
        return self.num_kv_heads * self.head_bytes

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer of one block, K and V."""
        return self.num_planes * self.plane_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all layers, K and V."""
        return self.num_layers * self.layer_bytes

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        return (self.num_layers, self.num_planes, self.num_kv_heads, self.block_size, self.head_dim)

    @property
    def layers(self) -> range:
        """This shard's layers, as the whole model counts them."""
        return range(self.first_layer, self.first_layer + self.num_layers)

    @property
    def heads(self) -> range:
        """This shard's KV heads, as the whole model counts them."""
        return range(self.tp_rank * self.num_kv_heads, (self.tp_rank + 1) * self.num_kv_heads)

    @property
    def num_layers_in_all(self) -> int:
        return self.num_layers if self.num_layers_of_whole is None else self.num_layers_of_whole

    @property
    def num_kv_heads_in_all(self) -> int:
        return self.num_kv_heads * self.tp_size

    @property
    def layers_name(self) -> str:
        """Names the layers of a shard that lacks some, such as `-layers8to15of32`; empty for all layers."""
        if self.num_layers == self.num_layers_in_all:
            return ""
        return f"-layers{self.layers[0]}to{self.layers[-1]}of{self.num_layers_in_all}"

    @property
    def shard_name(self) -> str:
        """Tells the blocks of a shard from those of others of the same fingerprint; empty for the whole."""
        return self.layers_name + (f"-tp{self.tp_rank}of{self.tp_size}" if self.tp_size > 1 else "")

    def fingerprint(self) -> str:
        """32 hex digits; equal if two workers' blocks hold the same bytes for the same tokens.

        The shard, of heads or layers, is left out on purpose: shards of one whole are exchangeable by offsets.
        """
        return self._digest(self.dtype)

    def fingerprint_but_dtype(self) -> str:
        """32 hex digits; equal if two workers' blocks would be exchangeable if both had the same dtype."""
        return self._digest("any")

    def _digest(self, dtype: str) -> str:
        kind = "kv1" if self.num_planes == 2 else f"kv1 of {self.num_planes}"
        sizes = (self.num_layers_in_all, self.num_kv_heads_in_all, self.head_dim, self.block_size)
        parts = (kind, self.model_id, *sizes, dtype)
        return hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=16).hexdigest()


SLACKS_S = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
"""Seconds that `WorkerLoad.queued_by_slack` is told for."""
LOAD_INTERVAL_S = 0.05  # a worker tells of its load when it changes, at most this often


def request_tag(request_id: str) -> int:
    """What names a request in reports of load: the CRC-32 of its id."""
    return zlib.crc32(request_id.encode())


class WorkerLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker tells routers, autoscalers and people about itself. All counts are current.

    Every block is in exactly one of three states, so `num_blocks - num_free_blocks - num_cached_blocks` are owned by
    a request, a lease or a transfer.
    """

    num_requests_running: int = 0
    num_requests_waiting: int = 0
    num_queued_prompt_tokens: int = 0  # prompt tokens whose KV is not computed yet
    num_queued_prompts: int = 0  # that these tokens belong to
    # Of these tokens, those of prompts with latency targets that have to begin within each of `SLACKS_S` to be in time;
    # empty: targets do not decide the order. Without any prompt that has targets, they do once a newcomer has some.
    queued_by_slack: tuple[int, ...] = ()
    num_blocks: int = 0
    num_free_blocks: int = 0  # hold nothing
    num_cached_blocks: int = 0  # hold a reusable prefix, owned by nobody
    num_leases: int = 0  # finished prefills whose blocks are held for a decode worker
    num_unstored_blocks: int = 0  # computed blocks that are still to be written to the store
    goes_by_slack: bool = False  # computes first what has the least time left to meet its latency targets
    # If there is no room for a newcomer: tokens that each running request is expected to draw until there is, behind
    # those that wait; then for the 2nd, 4th, 8th, ... newcomer. Empty: there is room, or nobody knows.
    room_after: tuple[int, ...] = ()
