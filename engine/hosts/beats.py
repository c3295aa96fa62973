"""Whether a process on another host still runs and can be reached: both send a byte, again and again, and another
one if they end as intended."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable

BEAT_S = 0.5
_BEAT, _END = b".", b"e"
SILENCE_S = 4.0  # after which the other process counts as lost: stopped, cut off, or too late to be of use


class Beats:
    """A thread that sends and listens, until `close` or until the peer is gone."""

    def __init__(
        self,
        end: socket.socket,
        peer: str,
        on_gone: Callable[[str], None] | None = None,
        *,
        silence_s: float = SILENCE_S,
    ) -> None:
        """`peer`: its name, for the line that `problem` gives. `on_gone` gets that line, once, on the thread; empty if
        the peer said that it ends."""
        self._end = end
        self._peer = peer
        self._on_gone = on_gone
        self._silence_s = silence_s
        self._closing = threading.Event()
        self.problem = ""
        """Why the peer is lost, in one line; empty if it is not."""
        self.has_said_end = False
        self._thread = threading.Thread(target=self._run, name=f"beats of {peer}", daemon=True)
        self._thread.start()

    def say_end(self) -> None:
        """Tells the peer that this process ends as intended. Any thread may call it; never waits."""
        with contextlib.suppress(OSError):
            self._end.send(_END, socket.MSG_DONTWAIT)

    def wait(self, timeout_s: float) -> None:
        """Until the peer is gone."""
        self._thread.join(timeout_s)

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
            if self._on_gone is not None:
                self._on_gone(problem)

    def _listen(self) -> str:
        """Returns why the peer is lost; empty if it said that it ends. What has come is read before the silence is
        measured: this process may have stood still itself."""
        poll = select.poll()
        poll.register(self._end, select.POLLIN)
        heard = sent = time.monotonic()
        with contextlib.suppress(BlockingIOError):
            self._end.send(_BEAT, socket.MSG_DONTWAIT)
        while not self._closing.is_set():
            try:
                if poll.poll(max(0.0, sent + BEAT_S - time.monotonic()) * 1000):
                    said = self._end.recv(4096)
                    if _END in said:
                        self.has_said_end = True
                        return ""
                    if not said:
                        return f"{self._peer} has ended"
                    heard = time.monotonic()
                if time.monotonic() - sent >= BEAT_S:
                    sent = time.monotonic()
                    with contextlib.suppress(BlockingIOError):  # it reads nothing: the silence below tells
                        self._end.send(_BEAT, socket.MSG_DONTWAIT)
            except OSError as error:
                return f"{self._peer} has ended ({error.strerror})"
            if time.monotonic() - heard >= self._silence_s:
                return f"{self._peer} has been silent for {self._silence_s:g} s: it was stopped, or cannot be reached"
        return ""
