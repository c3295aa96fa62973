"""Ranks of several hosts find each other: rank 0 listens, the others connect and keep trying, also those of its own
host."""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from msgspec import structs

from common.errors import StartupError
from engine.device import do_nothing
from engine.hosts.beats import Beats
from engine.hosts.handshake import Purpose, RefusedError, Start, ask, send, take
from engine.hosts.place import Place
from engine.ranks.messages import Channel

log = logging.getLogger(__name__)

_PROGRESS_S = 10.0  # between two lines that say who is missing
_RETRY_S = 0.5
_BACKLOG = 8  # connections that may wait to be taken


@dataclass(slots=True)
class Member:
    """Another process of this worker, as rank 0 knows a rank of another host, and such a rank rank 0."""

    number: int
    run: str
    on_gone: Callable[[str], None] | None = None  # see `Beats`
    sockets: dict[Purpose, socket.socket] = field(default_factory=dict)
    beats: Beats | None = None
    name: str = ""  # for messages, once it is complete

    @property
    def is_complete(self) -> bool:
        return len(self.sockets) == len(Purpose)

    @property
    def channel(self) -> Channel:
        return Channel(self.sockets[Purpose.STEPS])

    def add(self, purpose: Purpose, end: socket.socket) -> None:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sockets[purpose] = end
        if purpose is Purpose.BEATS:
            self.name = f"rank {self.number} ({end.getpeername()[0]})"
            self.beats = Beats(end, self.name, self.on_gone)

    def problem(self) -> str:
        return "" if self.beats is None else self.beats.problem

    def say_end(self) -> None:
        """See `Beats.say_end`."""
        if self.beats is not None:
            self.beats.say_end()

    def close(self) -> None:
        if self.beats is not None:
            self.beats.close()
        for end in self.sockets.values():
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


class MemberWatch:
    """An `engine.ranks.others.Watch`."""

    def __init__(self, members: Sequence[Member]) -> None:
        self._members = {member.number: member for member in members}

    def problem(self, rank: int) -> str:
        return self._members[rank].problem()

    def ended(self, rank: int) -> str:
        return self.problem(rank) or f"{self._members[rank].name} has ended"


def gather(place: Place, model: str, check: Callable[[], None] = do_nothing) -> list[Member]:
    """Waits for all other ranks; they are in the order of their numbers. `model`: its identity. A peer that is none of
    them is refused and logged, and others are waited for. `check` is called meanwhile, and what it raises ends the
    waiting. Raises `StartupError` if one is missing when the time is over."""
    family = socket.AF_INET6 if ":" in place.host else socket.AF_INET
    try:
        listener = socket.create_server((place.host, place.port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise StartupError(f"--ranks-address: cannot bind {place.host}:{place.port}: {error.strerror}") from error
    members: dict[int, Member] = {}
    try:
        with listener:
            _take_all(listener, place, model, members, check)
    except BaseException:
        for member in members.values():
            member.close()
        raise
    return [members[number] for number in sorted(members)]


def _take_all(
    listener: socket.socket, place: Place, model: str, members: dict[int, Member], check: Callable[[], None]
) -> None:
    give_up = time.monotonic() + place.timeout_s
    said_at = time.monotonic()
    refusal = ""
    while missing := _missing(place, members):
        check()
        now = time.monotonic()
        if now >= give_up:
            why = f"; the last peer was refused: {refusal}" if refusal else ""
            raise StartupError(f"{missing} did not come within {place.timeout_s:g} s (--ranks-timeout){why}")
        if now - said_at >= _PROGRESS_S:
            said_at = now
            log.info("waiting for ranks", extra={"missing": missing})
        listener.settimeout(min(_RETRY_S, give_up - now))
        try:
            end, (peer, *_) = listener.accept()
        except TimeoutError:
            continue
        try:
            hello = take(end, place, model)
        except (RefusedError, OSError, EOFError, ValueError) as error:
            refusal = f"{peer}: {error or type(error).__name__}"
            log.warning("a peer is not taken as a rank", extra={"peer": peer, "reason": str(error)})
            end.close()
            continue
        member = members.get(hello.rank)
        if member is None or member.run != hello.run:  # the rank's process was started anew
            if member is not None:
                member.close()
            member = members[hello.rank] = Member(hello.rank, hello.run)
        member.add(hello.purpose, end)


def _missing(place: Place, members: dict[int, Member]) -> str:
    for number, member in list(members.items()):
        if reason := member.problem():
            log.warning("a rank has gone while others were waited for", extra={"reason": reason})
            member.close()
            del members[number]
    numbers = [str(n) for n in range(1, place.num_ranks) if n not in members or not members[n].is_complete]
    return f"rank {', '.join(numbers)}" if numbers else ""


def join(place: Place, model: str, on_gone: Callable[[str], None]) -> Member:
    """Connects a rank of this host to rank 0, which may come later. `on_gone`: see `Beats`. Raises `StartupError` if
    rank 0 refuses it, or does not come in time."""
    give_up = time.monotonic() + place.timeout_s
    said_at = time.monotonic()
    address = f"{place.host}:{place.port}"
    while True:
        member = Member(0, secrets.token_hex(8), on_gone)
        try:
            for purpose in Purpose:
                end = socket.create_connection((place.host, place.port), timeout=_RETRY_S * 4)
                try:
                    ask(end, place, model, member.run, purpose)
                except BaseException:
                    end.close()
                    raise
                member.add(purpose, end)
        except (OSError, EOFError, ValueError) as error:
            member.close()
            now = time.monotonic()
            if now >= give_up:
                raise StartupError(
                    f"rank 0 does not answer at {address} for {place.timeout_s:g} s (--ranks-timeout): {error}"
                ) from error
            if now - said_at >= _PROGRESS_S:
                said_at = now
                log.info("waiting for rank 0", extra={"address": address, "reason": str(error)})
            time.sleep(_RETRY_S)
        except BaseException:
            member.close()
            raise
        else:
            return member


def start_all(members: Sequence[Member], start: Start, ranks_here: int) -> str:
    """Sends `start`. The first `ranks_here` ranks, rank 0 included, are on this host: they learn by which address other
    hosts reach it. Returns that address."""
    address: str = members[-1].sockets[Purpose.STEPS].getsockname()[0]  # that rank is on the last host
    for member in members:
        is_here = member.number < ranks_here
        send(member.sockets[Purpose.STEPS], structs.replace(start, address=address) if is_here else start)
    return address
