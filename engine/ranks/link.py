"""The way of hidden states from a rank of one stage to a rank of the next."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol

import torch

from common.errors import LostRankError
from engine.device import do_nothing
from engine.ranks.messages import LOOK_S

_HEADER = struct.Struct("<IIII")  # number of the message on its link, dtype, rows, columns
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_END_S = 0.5  # how long a process may take to end, from when its files are closed
_PIECE_S = 0.002  # `meanwhile` is called this often while nothing comes


class Link(Protocol):
    """Of one end, which either sends or receives. Only the thread that computes may use it."""

    def send(self, values: torch.Tensor) -> None:
        """Sends `values` `[num_tokens, hidden_size]`, which nobody may change any more; does not wait until the other
        end reads. Raises `LostRankError` if it is gone."""

    def receive(self, meanwhile: Callable[[], None] = do_nothing) -> torch.Tensor:
        """What the other end sent next, in the same dtype. `meanwhile` is called many times until then. Raises
        `LostRankError` if it will never come."""

    def close(self) -> None: ...


class SocketLink:
    """A `Link` over a connected stream socket.

    What the socket does not take at once waits for a thread of this end, so that a stage computes on while the next one
    is busy. No more than two steps' hidden states wait, as no more steps are under way.
    """

    def __init__(self, end: socket.socket, problem: Callable[[], str]) -> None:
        """`problem` is asked ten times a second, while this end waits, for why the other one will never answer."""
        self._socket = end
        self._problem = problem
        self._num_messages = 0
        self._outbox: SimpleQueue[memoryview | None] = SimpleQueue()
        self._sender: threading.Thread | None = None
        self._lock = threading.Lock()  # for what the thread changes, too
        self._num_waiting = 0  # in the outbox, or on their way out of it
        self._error: OSError | None = None

    def send(self, values: torch.Tensor) -> None:
        header = _HEADER.pack(self._num_messages, _DTYPES.index(values.dtype), *values.shape)
        self._num_messages += 1
        pieces = [memoryview(header), _bytes_of(values.contiguous())]
        with self._lock:
            if self._error is not None:
                raise self._lost() from self._error
            may_send = self._num_waiting == 0
        if may_send:
            pieces = self._send_now(pieces)
        if pieces:
            self._leave(pieces)

    def receive(self, meanwhile: Callable[[], None] = do_nothing) -> torch.Tensor:
        header = bytearray(_HEADER.size)
        self._fill(memoryview(header), meanwhile)
        number, dtype, rows, columns = _HEADER.unpack(header)
        if number != self._num_messages or dtype >= len(_DTYPES):
            raise LostRankError(f"hidden states number {number} came, not {self._num_messages}")
        self._num_messages += 1
        values = torch.empty(rows, columns, dtype=_DTYPES[dtype])
        self._fill(_bytes_of(values), meanwhile)
        return values

    def close(self) -> None:
        """What was not sent yet is lost."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # a thread that sends finds it out, too
        if self._sender is not None:
            self._outbox.put(None)
            self._sender.join()
        self._socket.close()

    def _send_now(self, pieces: list[memoryview]) -> list[memoryview]:
        """Returns what the socket did not take."""
        try:
            count = self._socket.sendmsg(pieces, (), socket.MSG_DONTWAIT)
        except BlockingIOError:
            return pieces
        except OSError as error:
            raise self._lost() from error
        rest = []
        for piece in pieces:
            if count < len(piece):
                rest.append(piece[count:])
            count = max(0, count - len(piece))
        return rest

    def _leave(self, pieces: list[memoryview]) -> None:
        """To the thread that sends."""
        if self._sender is None:
            self._sender = threading.Thread(target=self._send_waiting, name="hidden states", daemon=True)
            self._sender.start()
        with self._lock:
            self._num_waiting += len(pieces)
        for piece in pieces:
            self._outbox.put(piece)

    def _send_waiting(self) -> None:
        while (data := self._outbox.get()) is not None:
            try:
                self._socket.sendall(data)
            except OSError as error:
                with self._lock:
                    self._error = error  # the next `send` raises it
                return
            with self._lock:
                self._num_waiting -= 1

    def _fill(self, into: memoryview, meanwhile: Callable[[], None]) -> None:
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        looked_at = time.monotonic()
        while into:
            try:
                count = self._socket.recv_into(into, 0, socket.MSG_DONTWAIT)
            except BlockingIOError:
                if poll.poll(_PIECE_S * 1000):
                    continue
                meanwhile()
                now = time.monotonic()
                if now - looked_at >= LOOK_S:
                    looked_at = now
                    if reason := self._problem():
                        raise LostRankError(reason) from None
                continue
            except OSError as error:
                raise self._lost() from error
            if not count:
                raise self._lost()
            into = into[count:]

    def _lost(self) -> LostRankError:
        """Says why the other end is closed: a process that is killed closes its files a little before it has ended."""
        give_up = time.monotonic() + _END_S
        while not (reason := self._problem()) and time.monotonic() < give_up:
            time.sleep(_PIECE_S)
        return LostRankError(reason or "a rank of another stage has closed its connection")


def _bytes_of(values: torch.Tensor) -> memoryview:
    return values.view(-1).view(torch.uint8).numpy().data
