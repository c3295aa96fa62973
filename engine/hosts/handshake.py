"""How a rank of another host and rank 0 make sure of each other, on each of their connections.

Both prove that they know the secret, which is never sent: an HMAC (RFC 2104) with SHA-256 of what each of them chose at
random. Then rank 0 compares what has to be equal. What follows on a connection is neither encrypted nor signed.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import struct
from enum import StrEnum
from typing import TypeVar

import msgspec

from common.errors import StartupError
from common.version import VERSION
from engine.hosts.place import Place

_LENGTH = struct.Struct("<I")
_MAX_BYTES = 1 << 20
_NONCE_BYTES = 32
HANDSHAKE_S = 3.0  # that a peer may take for each message


class Purpose(StrEnum):
    STEPS = "steps"
    KV = "kv"
    BEATS = "beats"


class Challenge(msgspec.Struct, frozen=True, kw_only=True):
    release: str
    nonce: bytes


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    release: str
    nonce: bytes
    proof: bytes
    rank: int
    num_hosts: int
    num_ranks: int  # of all hosts
    model: str  # identity of its weights
    run: str  # of the process; another one in each life
    purpose: Purpose


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    refusal: str = ""  # one line; empty if the peer is taken
    proof: bytes = b""


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """The first message for steps: what the rank computes with, once all are there."""

    settings: str  # EngineSettings as JSON, those of rank 0
    store_port: int  # of the `TCPStore` on rank 0's host
    address: str = ""  # of this host, as others reach it; empty: this end's of the connection


class RefusedError(Exception):
    """Why a peer is not taken, in one line."""


T = TypeVar("T")


def send(end: socket.socket, message: msgspec.Struct) -> None:
    data = msgspec.msgpack.encode(message)
    end.sendall(_LENGTH.pack(len(data)) + data)


def receive(end: socket.socket, kind: type[T]) -> T:
    """Raises `OSError` or `EOFError` if the peer is gone or late, `ValueError` if it says something else."""
    return msgspec.msgpack.decode(receive_bytes(end, _MAX_BYTES), type=kind)


def receive_bytes(end: socket.socket, max_bytes: int) -> bytearray:
    """One message. Raises as `receive`."""
    (length,) = _LENGTH.unpack(receive_exactly(end, _LENGTH.size))
    if length > max_bytes:
        raise ValueError(f"a message of {length} bytes")
    return receive_exactly(end, length)


def receive_exactly(end: socket.socket, num_bytes: int) -> bytearray:
    data = bytearray(num_bytes)
    receive_into(end, memoryview(data))
    return data


def receive_into(end: socket.socket, data: memoryview) -> None:
    while data:
        count = end.recv_into(data)
        if not count:
            raise EOFError("the other end is closed")
        data = data[count:]


def _proof(secret: bytes, side: str, hello: Hello, challenge: Challenge) -> bytes:
    """Of everything that was said, so nothing of it can be used for another connection."""
    said = msgspec.msgpack.encode([side, challenge, msgspec.structs.replace(hello, proof=b"")])
    return hmac.digest(secret, said, "sha256")


def take(end: socket.socket, place: Place, model: str) -> Hello:
    """Rank 0's side, which is at `place` and has `model`. Raises `RefusedError` if the peer is not a rank of this
    worker, after it was told, and `OSError`, `EOFError` or `ValueError` if it does not speak so."""
    end.settimeout(HANDSHAKE_S)
    challenge = Challenge(release=VERSION, nonce=secrets.token_bytes(_NONCE_BYTES))
    send(end, challenge)
    hello = receive(end, Hello)
    refusal = ""
    if not hmac.compare_digest(hello.proof, _proof(place.secret, "rank", hello, challenge)):
        refusal = "its secret is another one (--ranks-secret-file)"
    elif hello.release != VERSION:
        refusal = f"it is of release {hello.release}, not {VERSION}"
    elif hello.num_hosts != place.num_hosts:
        refusal = f"it was told of {hello.num_hosts} hosts, not {place.num_hosts} (--num-hosts)"
    elif hello.num_ranks != place.num_ranks:
        refusal = f"it was told of {hello.num_ranks} ranks, not {place.num_ranks} (--tensor-parallel-size)"
    elif not 1 <= hello.rank < place.num_ranks:
        refusal = f"rank {hello.rank} is none of the ranks 1 to {place.num_ranks - 1} (--host-index)"
    elif hello.model != model:
        refusal = f"its model is {hello.model}, not {model} (--model)"
    if refusal:
        with contextlib.suppress(OSError):
            send(end, Verdict(refusal=refusal))
        raise RefusedError(refusal)
    send(end, Verdict(proof=_proof(place.secret, "rank 0", hello, challenge)))
    end.settimeout(None)
    return hello


def ask(end: socket.socket, place: Place, model: str, run: str, purpose: Purpose, *, release: str = VERSION) -> None:
    """The other side, at `place`. Raises `StartupError` if rank 0 refuses it, or does not have the secret; else as
    `take`."""
    end.settimeout(2 * HANDSHAKE_S)
    challenge = receive(end, Challenge)
    hello = Hello(
        release=release,
        nonce=secrets.token_bytes(_NONCE_BYTES),
        proof=b"",
        rank=place.rank,
        num_hosts=place.num_hosts,
        num_ranks=place.num_ranks,
        model=model,
        run=run,
        purpose=purpose,
    )
    send(end, msgspec.structs.replace(hello, proof=_proof(place.secret, "rank", hello, challenge)))
    verdict = receive(end, Verdict)
    if verdict.refusal:
        raise StartupError(f"rank 0 does not take this host as rank {place.rank}: {verdict.refusal}")
    if not hmac.compare_digest(verdict.proof, _proof(place.secret, "rank 0", hello, challenge)):
        raise StartupError("who answers at --ranks-address does not have the secret (--ranks-secret-file)")
    end.settimeout(None)
