"""What rank 0 and the other ranks of a worker say to each other, over a stream socket.

Rank 0 says `Join` once, with the descriptors that ranks meet by (engine/ranks/meeting.py), then each step when it
begins, and of several stages the first one what the last one drew. A rank answers `Ready`, and `Done` to each step; or
`Failed`, and ends.
"""

from __future__ import annotations

import array
import contextlib
import select
import socket
import struct
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import TypeAlias

import msgspec

from common.logs import LogFormat
from common.types import KVCacheSpec
from engine.blocks.host_tier import BlockCopy, BlockCopyKind
from engine.device import do_nothing
from engine.ranks.layout import Layout
from engine.step import Draw, Drawn, Scoring, StepInput, StepRow

LOOK_S = 0.1  # between two looks at whether a rank that is waited for lives
_LENGTH = struct.Struct("<I")
_MAX_BYTES = 1 << 30
_MAX_FILES = 8


class Join(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    rank: int
    layout: Layout
    files: list[str]  # names of the descriptors that come with this message
    pids: list[int]  # of all ranks
    name: str  # of the process, in log lines
    model_dir: str
    settings: str  # EngineSettings as JSON: this rank's share of threads and memory
    cores: list[int]  # that it is pinned to; empty: none
    has_core: bool  # each rank has one
    log_level: str
    log_format: LogFormat


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What must be equal on all ranks, but for their place in `spec`."""

    release: str
    spec: KVCacheSpec
    num_blocks: int
    num_cache_blocks: int
    max_model_len: int
    vocab_size: int
    hidden_size: int
    kernels: str


class Failed(msgspec.Struct, frozen=True, tag=True):
    reason: str  # one line


class Drawing(IntEnum):
    """What of a `Draw` the other ranks have to know: which exchanges rank 0 needs them for."""

    NOTHING = 0
    LIKELIEST = 1
    ANY = 2

    @classmethod
    def of(cls, draw: Draw | None) -> Drawing:
        if draw is None:
            return cls.NOTHING
        return cls.LIKELIEST if draw.is_likeliest else cls.ANY

    def as_draw(self) -> Draw | None:
        return None if self is Drawing.NOTHING else Draw(index=0, temperature=1.0 if self is Drawing.ANY else 0.0)


CopiedBlock: TypeAlias = tuple[str, int, int]  # kind, block of the device, block of the host


def _copied_blocks(copies: Sequence[BlockCopy]) -> list[CopiedBlock]:
    return [(copy.kind.value, copy.device_block, copy.host_block) for copy in copies]


def _block_copies(copied: Sequence[CopiedBlock]) -> list[BlockCopy]:
    return [BlockCopy(BlockCopyKind(kind), *blocks) for kind, *blocks in copied]


class Row(msgspec.Struct, frozen=True, array_like=True, gc=False):
    token_ids: list[int]
    num_computed_tokens: int
    block_ids: bytes  # int32
    drawing: Drawing
    score: Scoring | None
    num_pooled: int
    first: tuple[int, int] | None  # step and row that drew the first token


class Step(msgspec.Struct, frozen=True, tag=True):
    """Rank 0 draws, so what draws depend on stays there."""

    number: int
    rows: list[Row]
    copies: list[CopiedBlock]  # for a rank that has its own host memory

    @classmethod
    def of(cls, step: StepInput) -> Step:
        return cls(
            step.number,
            [
                Row(
                    row.token_ids,
                    row.num_computed_tokens,
                    array.array("i", row.block_ids).tobytes(),
                    Drawing.of(row.draw),
                    row.score,
                    row.num_pooled,
                    None if row.first is None else (row.first.step, row.first.row),
                )
                for row in step.rows
            ],
            _copied_blocks(step.copies),
        )

    def as_input(self) -> StepInput:
        rows = []
        for row in self.rows:
            block_ids = array.array("i")
            block_ids.frombytes(row.block_ids)
            rows.append(
                StepRow(
                    token_ids=row.token_ids,
                    num_computed_tokens=row.num_computed_tokens,
                    block_ids=block_ids,
                    draw=row.drawing.as_draw(),
                    score=row.score,
                    num_pooled=row.num_pooled,
                    first=None if row.first is None else Drawn(*row.first),
                )
            )
        return StepInput(number=self.number, rows=rows, copies=_block_copies(self.copies))


class Tokens(msgspec.Struct, frozen=True, tag=True):
    """To ranks of the first stage: what rows of a step drew that a later step begins with."""

    step: int  # its number
    rows: list[int]
    token_ids: list[int | None]  # of each; None: it drew none


class Done(msgspec.Struct, frozen=True, tag=True):
    """The KV of the step's new tokens is in the cache."""

    number: int  # of the step


class Copy(msgspec.Struct, frozen=True, tag=True):
    """To a rank that has its own host memory: copies of blocks that are no step's, before the steps that follow."""

    copies: list[CopiedBlock]

    @classmethod
    def of(cls, copies: Sequence[BlockCopy]) -> Copy:
        return cls(_copied_blocks(copies))

    def as_copies(self) -> list[BlockCopy]:
        return _block_copies(self.copies)


Message: TypeAlias = Join | Ready | Failed | Step | Tokens | Done | Copy

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


class Channel:
    """One end of a connected stream socket."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    def send(self, message: Message, files: Sequence[int] = (), while_full: Callable[[], None] = do_nothing) -> None:
        """`files`: descriptors that the other end gets copies of. Raises `OSError` if it is gone. While it does not
        read, and the socket is full, `while_full` is called each `LOOK_S`; what it raises ends the waiting, and the
        channel is of no use then."""
        data = _encoder.encode(message)
        data = _LENGTH.pack(len(data)) + data
        if files:
            data = data[socket.send_fds(self._socket, [data], list(files)) :]
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[self._socket.send(rest, socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                if not self._has_room(LOOK_S):
                    while_full()

    def receive(self) -> tuple[Message, list[int]]:
        """The next message and the descriptors that came with it; waits for it. Raises `EOFError` if the other end is
        closed, `OSError` or `ValueError` if it is of no use."""
        header, files = self._exactly(_LENGTH.size)
        (length,) = _LENGTH.unpack(header)
        if length > _MAX_BYTES:
            raise ValueError(f"a message of {length} bytes")
        data, more = self._exactly(length)
        return _decoder.decode(data), files + more

    def has_message(self, timeout_s: float = 0.0) -> bool:
        """Whether `receive` would begin to read, or find the other end closed. Waits so long for that."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))

    def _has_room(self, timeout_s: float) -> bool:
        """Whether more can be sent, or the other end is closed. Waits so long for that."""
        poll = select.poll()
        poll.register(self._socket, select.POLLOUT)
        return bool(poll.poll(timeout_s * 1000))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _exactly(self, num_bytes: int) -> tuple[bytearray, list[int]]:
        data, files = bytearray(), list[int]()
        while len(data) < num_bytes:
            part, came, _, _ = socket.recv_fds(self._socket, num_bytes - len(data), _MAX_FILES)
            files += came
            if not part:
                raise EOFError("the other end is closed")
            data += part
        return data, files
