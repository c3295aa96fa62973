"""Who is behind a peer's `describe()`, and whether the two of us may exchange blocks."""

from __future__ import annotations

from dataclasses import fields

import msgspec

from common.errors import IncompatibleError, TransferError
from common.types import KVCacheSpec


class PeerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What P2P connectors tell each other, as msgpack. `name` and `epoch` are those of the peer's `BlockRef`s."""

    connector: str
    name: str
    epoch: str
    spec: KVCacheSpec
    num_blocks: int
    transport: bytes = b""  # what the connector itself adds


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(PeerInfo)


def encode_peer(info: PeerInfo) -> bytes:
    return _encoder.encode(info)


def decode_peer(data: bytes) -> PeerInfo:
    """Raises `TransferError` for bytes that are no peer."""
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TransferError(f"peer: not a description of a connector: {error}") from error


def check_compatible(connector: str, spec: KVCacheSpec, peer: PeerInfo) -> None:
    """Raises `IncompatibleError` that names every field in which our blocks and the peer's differ."""
    if peer.connector != connector:
        raise IncompatibleError(f"connector: peer {peer.name!r} has {peer.connector!r}, this worker {connector!r}")
    differing = [
        f"{field.name} {getattr(peer.spec, field.name)!r} (here {getattr(spec, field.name)!r})"
        for field in fields(KVCacheSpec)
        if getattr(peer.spec, field.name) != getattr(spec, field.name)
    ]
    if differing:
        raise IncompatibleError(f"peer {peer.name!r} has other KV blocks: {', '.join(differing)}")
