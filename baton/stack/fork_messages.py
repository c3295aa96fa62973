"""What a stack and its fork server tell each other: one message in each packet of a unix socket."""

from __future__ import annotations

import msgspec

MAX_BYTES = 1 << 16


class Imported(msgspec.Struct, frozen=True, tag=True):
    """From the server, before all else: it has imported what workers need. `reason` is why it can fork none."""

    reason: str = ""


class Fork(msgspec.Struct, frozen=True, tag=True):
    """To the server: fork a worker. Comes with two descriptors, its standard output and error. Answered by `Forked`."""

    name: str
    arguments: list[str]  # of `baton`
    cores: list[int]  # anywhere if empty


class Reap(msgspec.Struct, frozen=True, tag=True):
    """To the server: the stack has seen that this process ended, and its pid is free."""

    pid: int


class Forked(msgspec.Struct, frozen=True, tag=True):
    """From the server. `pid` is 0 if there can be no more processes, for `reason`."""

    pid: int
    reason: str = ""


class Ended(msgspec.Struct, frozen=True, tag=True):
    """From the server: a process has ended. It keeps its pid until `Reap`."""

    pid: int
    code: int  # exit code; -N if signal N ended it


Message = Imported | Fork | Reap | Forked | Ended


_DECODER: msgspec.json.Decoder[Message] = msgspec.json.Decoder(Message)


def encode(message: Message) -> bytes:
    return msgspec.json.encode(message)


def decode(packet: bytes) -> Message:
    return _DECODER.decode(packet)
