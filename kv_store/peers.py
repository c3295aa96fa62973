"""Decodes a peer's `describe()`, and checks whether the peer and this worker may exchange blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from common.errors import IncompatibleError, TransferError
from common.types import KVCacheSpec
from kv_store.base import BlockRef
from kv_store.shards import CommonPart, parts


class PeerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What P2P connectors tell each other, as msgpack: one rank about itself, or all ranks of a worker joined.

    `name` and `epoch` are those of the worker's `BlockRef`s.
    """

    connector: str
    name: str
    epoch: str
    spec: KVCacheSpec  # of any rank
    num_blocks: int
    transports: dict[int, bytes]  # by rank: what the connector itself adds


MAX_BLOCKS = 1 << 22  # of one worker, and more than any of its other numbers; what reads from it keeps a list of them

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(PeerInfo)


def encode_peer(info: PeerInfo) -> bytes:
    return _encoder.encode(info)


def decode_peer(data: bytes) -> PeerInfo:
    """Raises `TransferError` for bytes that describe no peer, and for impossible numbers: the product of two negative
    numbers could equal ours."""
    try:
        info = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TransferError(f"peer: not a description of a connector: {error}") from error
    spec = info.spec
    positive = ("num_layers", "num_planes", "num_kv_heads", "head_dim", "block_size", "tp_size")
    numbers = {**{name: getattr(spec, name) for name in positive}, "num_blocks": info.num_blocks}
    for name, value in numbers.items():
        if not 1 <= value <= MAX_BLOCKS:
            raise TransferError(f"peer: {name} is {value}, not in [1, {MAX_BLOCKS}]")
    if not (spec.first_layer >= 0 and spec.layers.stop <= spec.num_layers_in_all <= MAX_BLOCKS):
        raise TransferError(f"peer: {_layers(spec)} are not layers of a model of {spec.num_layers_in_all}")
    for rank in (spec.tp_rank, *info.transports):
        if not 0 <= rank < spec.tp_size:
            raise TransferError(f"peer: {rank} is not a rank of {spec.tp_size}")
    return info


def join_peers(descriptions: Sequence[bytes]) -> bytes:
    """One description of a worker, out of those of its ranks, in any order.

    Raises `IncompatibleError` if they are not the ranks of one worker, `TransferError` for bytes that are no peer.
    """
    ranks = [decode_peer(description) for description in descriptions]
    if not ranks:
        raise IncompatibleError("peer: a worker of no ranks")
    first = _without_rank(ranks[0])
    for rank in ranks:
        if _without_rank(rank) != first:
            raise IncompatibleError(f"peer {rank.name!r}: rank {rank.spec.tp_rank} is of another worker")
    transports = {number: data for rank in ranks for number, data in rank.transports.items()}
    return encode_peer(msgspec.structs.replace(first, transports=transports))


def join_refs(ranks: Sequence[BlockRef]) -> BlockRef:
    """One reference to a block, out of those that the ranks of a worker gave, by rank."""
    first = ranks[0]
    if any(
        (ref.index, ref.block_hash, ref.block_id) != (first.index, first.block_hash, first.block_id) for ref in ranks
    ):
        raise ValueError("the ranks of a worker refer to different blocks")
    return msgspec.structs.replace(
        first,
        checksums=tuple(checksum for ref in ranks for checksum in ref.checksums),
        staged_slots=tuple(slot for ref in ranks for slot in ref.staged_slots),
    )


def check_compatible(connector: str, spec: KVCacheSpec, peer: PeerInfo) -> list[CommonPart]:
    """What we need of each rank of the peer.

    Raises `IncompatibleError` that names every field in which our blocks and the peer's differ, or the ranks that the
    description leaves out. The tensor-parallel degrees may differ, the layers may not.
    """
    if peer.connector != connector:
        raise IncompatibleError(f"connector: peer {peer.name!r} has {peer.connector!r}, this worker {connector!r}")
    ours, theirs = _whole(spec), _whole(peer.spec)
    differing = [f"{name} {theirs[name]!r} (here {value!r})" for name, value in ours.items() if theirs[name] != value]
    if differing:
        raise IncompatibleError(f"peer {peer.name!r} has other KV blocks: {', '.join(differing)}")
    if spec.layers != peer.spec.layers:  # a head's checksum is that of all layers of its shard
        raise IncompatibleError(
            f"peer {peer.name!r} has other layers: {_layers(peer.spec)} (here {_layers(spec)}) "
            f"of {spec.num_layers_in_all}"
        )
    needed = parts(spec, peer.spec)
    if missing := [str(part.rank) for part in needed if part.rank not in peer.transports]:
        raise IncompatibleError(
            f"peer {peer.name!r} does not say how to reach its rank {', '.join(missing)} of {peer.spec.tp_size}"
        )
    return needed


def _whole(spec: KVCacheSpec) -> dict[str, str | int]:
    """The fields that must be equal, whatever the shards."""
    return {
        "model_id": spec.model_id,
        "num_layers": spec.num_layers_in_all,
        "num_planes": spec.num_planes,
        "num_kv_heads": spec.num_kv_heads_in_all,
        "head_dim": spec.head_dim,
        "block_size": spec.block_size,
        "dtype": spec.dtype,
    }


def _without_rank(info: PeerInfo) -> PeerInfo:
    return msgspec.structs.replace(info, spec=replace(info.spec, tp_rank=0), transports={})


def _layers(spec: KVCacheSpec) -> str:
    return f"{spec.layers.start} to {spec.layers.stop - 1}"
