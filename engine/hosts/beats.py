"""Whether a process on another host still runs and can be reached: both send a byte, again and again."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable

BEAT_S = 0.5
SILENCE_S = 4.0  # after which the other process counts as lost: stopped, cut off, or too late to be of use


class Beats:
    """A thread that sends and listens, until `close` or until the peer is lost."""

    def __init__(
        self,
        end: socket.socket,
        peer: str,
        on_lost: Callable[[str], None] | None = None,
        *,
        silence_s: float = SILENCE_S,
    ) -> None:
        """`peer`: its name, for the line that `problem` gives. `on_lost` gets that line, once, on the thread."""
        self._end = end
        self._peer = peer
        self._on_lost = on_lost
        self._silence_s = silence_s
        self._closing = threading.Event()
        self.problem = ""
        """Why the peer is lost, in one line; empty if it is not."""
        self._thread = threading.Thread(target=self._run, name=f"beats of {peer}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._end.close()

    def _run(self) -> None:
        problem = self._listen()
        if not self._closing.is_set():
            self.problem = problem
            if self._on_lost is not None:
                self._on_lost(problem)

    def _listen(self) -> str:
        """Returns why it ends. What has come is read before the silence is measured: this process may have stood still
        itself."""
        poll = select.poll()
        poll.register(self._end, select.POLLIN)
        heard = sent = time.monotonic()
        with contextlib.suppress(BlockingIOError):
            self._end.send(b".", socket.MSG_DONTWAIT)
        while not self._closing.is_set():
            try:
                if poll.poll(max(0.0, sent + BEAT_S - time.monotonic()) * 1000):
                    if not self._end.recv(4096):
                        return f"{self._peer} has ended"
                    heard = time.monotonic()
                if time.monotonic() - sent >= BEAT_S:
                    sent = time.monotonic()
                    with contextlib.suppress(BlockingIOError):  # it reads nothing: the silence below tells
                        self._end.send(b".", socket.MSG_DONTWAIT)
            except OSError as error:
                return f"{self._peer} has ended ({error.strerror})"
            if time.monotonic() - heard >= self._silence_s:
                return f"{self._peer} has been silent for {self._silence_s:g} s: it was stopped, or cannot be reached"
        return ""
