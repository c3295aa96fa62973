"""What rank 0 says to the other ranks of its worker and hears from them, on whatever host they are."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Protocol

from common.errors import LostRankError
from engine.device import DeviceInfo, do_nothing
from engine.ranks.messages import LOOK_S, Channel, Done, Failed, Message


class Watch(Protocol):
    """Whether the processes of ranks still run. Never waits."""

    def problem(self, rank: int) -> str:
        """Why the rank will compute nothing any more, in one line; empty if it may."""

    def ended(self, rank: int) -> str:
        """The line for a rank that has closed its connection."""


class OtherRanks:
    """A rank that is lost or fails ends all: the others wait for values that never come. Any thread may call this."""

    def __init__(self, channels: Mapping[int, Channel], watch: Watch) -> None:
        """`channels` by rank. They stay the caller's."""
        self._channels = channels
        self._watch = watch
        self._said: dict[int, tuple[Message, list[int]]] = {}  # by rank: read, and not taken yet
        self._reading = threading.Lock()
        self._sending = threading.Lock()

    def send(self, message: Message, ranks: Iterable[int] | None = None) -> None:
        """To these ranks; to all if None. Raises `LostRankError`."""
        with self._sending:
            for rank in self._channels if ranks is None else ranks:
                try:
                    self._channels[rank].send(message, while_full=self.check)
                except OSError as error:
                    raise LostRankError(self.problem() or f"rank {rank} does not listen") from error

    def answer(self, rank: int, meanwhile: Callable[[], None] = do_nothing) -> tuple[Message, list[int]]:
        """What the rank says next, and the descriptors that came with it, which are the caller's. `meanwhile` is called
        each `LOOK_S` until then. Raises `LostRankError` if a rank is lost, or says that it failed."""
        channel = self._channels[rank]
        while rank not in self._said and not channel.has_message(LOOK_S):
            self.check()
            meanwhile()
        with self._reading:
            if reason := self._read(rank):
                raise LostRankError(reason)
            return self._said.pop(rank)

    def wait_for_step(self, number: int, meanwhile: Callable[[], None] = do_nothing) -> None:
        """Until all ranks have computed step `number`, the first whose end nobody has waited for. `meanwhile` and what
        is raised: as `answer`."""
        for rank in self._channels:
            message, _ = self.answer(rank, meanwhile)
            if message != Done(number):
                raise LostRankError(f"rank {rank} said {message!r} to step {number}")

    def check(self) -> None:
        """Raises `LostRankError` if one of them will compute nothing any more."""
        if reason := self.problem():
            raise LostRankError(reason)

    def problem(self) -> str:
        """Why one of them will compute nothing any more, in one line; empty if all may. Never waits."""
        with self._reading:
            return next(filter(None, (self._read(rank) or self._watch.problem(rank) for rank in self._channels)), "")

    def close(self) -> None:
        """Closes descriptors that nobody took."""
        with self._reading:
            for _, files in self._said.values():
                for file in files:
                    os.close(file)
            self._said.clear()

    def _read(self, rank: int) -> str:
        """Reads what the rank says, if what it said before was taken. Returns why it will compute nothing any more, if
        it says so. Only for who has the lock."""
        channel = self._channels[rank]
        if rank not in self._said and channel.has_message():
            try:
                self._said[rank] = channel.receive()
            except (EOFError, OSError):
                return self._watch.ended(rank)
            except Exception as error:
                return f"rank {rank} cannot be understood: {type(error).__name__}: {error}"
        match self._said.get(rank):
            case (Failed(reason), _):
                return f"rank {rank}: {reason}"
        return ""


def info_of_all(info: DeviceInfo, sharers: str) -> DeviceInfo:
    """Of a device of several ranks, which to others looks like one. `info`: rank 0's. `sharers`: who they are."""
    spec = replace(info.spec, num_kv_heads=info.spec.num_kv_heads_in_all, tp_size=1, tp_rank=0)
    return replace(info, spec=spec, device_reason=f"{info.device_reason}; {sharers} share the model")
