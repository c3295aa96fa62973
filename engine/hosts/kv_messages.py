"""What rank 0 and the ranks of other hosts say to each other about KV blocks, over a connection of its own.

Rank 0 says `Open` once; a rank answers `Opened` or `Refused`. From then on rank 0 sends what a `KVConnector` is asked
for, and a rank what its connectors answer. `of` is 0 for the connector that hands prompts over, 1 for the store beside
it.

A rank copies blocks to and from host memory when it comes to that among its steps, so what was asked for after some
copies says how many: see `MemberKV`.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from common import metrics
from common.metric_relay import Change
from kv_store.base import FetchBlock, LocalBlock, TransferResult


class Open(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    connector: str
    store: str  # beside the connector; empty: none
    epoch: str  # of the worker, as in `ConnectorConfig`
    worker_id: str


class AddPeer(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    of: int
    after: int = 0  # copies
    peer: bytes


class Publish(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    of: int
    after: int
    job_id: int
    blocks: list[LocalBlock]


class Fetch(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    of: int
    after: int
    job_id: int
    blocks: list[FetchBlock]


class Release(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    of: int
    after: int = 0
    job_id: int


class Touch(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    of: int
    after: int = 0
    block_hashes: list[bytes]


class Evict(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    of: int
    after: int = 0
    number: int  # of the eviction
    block_hashes: list[bytes]


class Opened(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    descriptions: list[bytes]  # what `describe` gives, by `of`


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    reason: str  # one line


class Results(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    of: int
    results: list[TransferResult]


class Counted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    changes: list[Change]  # of `COUNTERS`, since the rank said so last


class Evicted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    number: int
    num_blocks: int
    failure: str


Call: TypeAlias = AddPeer | Publish | Fetch | Release | Touch | Evict
ToMember: TypeAlias = Open | Call
ToRank0: TypeAlias = Opened | Refused | Results | Evicted | Counted

COUNTERS = (
    metrics.kv_store_failed_blocks,
    metrics.kv_store_failed_lookups,
    metrics.kv_store_evicted_runs,
    metrics.kv_store_evicted_bytes,
)
"""What connectors count: rank 0 has the sums of all ranks."""

MAX_BYTES = 1 << 28  # of one message: the references of a very long prompt's blocks
to_member: msgspec.msgpack.Decoder[ToMember] = msgspec.msgpack.Decoder(ToMember)
to_rank_0: msgspec.msgpack.Decoder[ToRank0] = msgspec.msgpack.Decoder(ToRank0)
