"""HTTP/1.1 connections, with limits: how many, and how long a client may take for the head of a request.

A connection that waits for no answer is idle: a new one too, and one whose answer came before all of its body did.
If all places are taken, the one that has been idle longest gives way to a newcomer: clients that connect and say
nothing keep nobody out. One in its TLS handshake is idle, too (`tls_listener`).

A request may be refused while its body still comes. To close then would reset the connection, and the client would
report a broken pipe instead of the answer. So what it still sends is read and thrown away: at most MAX_LATE_BYTES, for
the time that a body may take, and no longer than SILENT_S without a byte. The connection is idle meanwhile.
"""

from __future__ import annotations

import asyncio
import functools
import json
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol, RequestResponseCycle
from uvicorn.server import ServerState

from common import metrics
from common.errors import BatonError, UnavailableError
from router.api.rest.http.error_body import HeadTooLateError, NotHttpError, error_body

MAX_HEAD_BYTES = 32 * 2**10
MAX_AHEAD_BYTES = 2**20  # of requests behind the one that is answered
MAX_LATE_BYTES = 256 * 2**20  # that are read behind an answer that refuses what they belong to, and thrown away
SILENT_S = 5.0  # without a byte of these
MAX_LINGERING = 64  # connections without a place that are told so, and may read it
WRITE_PIECE = "baton.write_piece"
"""In a request's ASGI scope if its answer can be sent in pieces: a `WritePiece`. Valid while the answer is, between the
message that begins it (without a length) and the one that ends it."""
ON_GONE = "baton.on_gone"
"""In a request's ASGI scope while it is answered: an `OnGone`."""
TAKE_BODY = "baton.take_body"
"""In a request's ASGI scope while it is answered: a `TakeBody`."""


Headers = Sequence[tuple[bytes, bytes]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
WritePiece = Callable[[bytes], Awaitable[None] | None]
"""Takes a piece. What it returns has to be awaited before the next piece: the client is slow."""


OnGone = Callable[[Callable[[], None] | None], None]
"""Sets what is called, soon, if the client disconnects before its answer is complete; None: nothing any more. The
request's body must have been read."""
TakeBody = Callable[[], bytes | None]
"""Takes the request's body, if all of it is there; None if it has to be received."""


def _closing(error: BatonError) -> bytes:
    """An answer to a connection that has no request, as a whole. The connection is closed after it."""
    body = json.dumps(error_body(error), separators=(",", ":")).encode()
    lines = [b"HTTP/1.1 %d %b" % (error.http_status, STATUS_PHRASES[error.http_status])]
    lines += [b"content-type: application/json", b"content-length: %d" % len(body), b"connection: close"]
    if error.retry_after_s is not None:
        lines.append(b"retry-after: %d" % max(1, math.ceil(error.retry_after_s)))
    return b"\r\n".join([*lines, b"", body])


FULL = _closing(UnavailableError("there are as many connections as may be"))
LATE = _closing(HeadTooLateError("no head of a request came in time"))


class Idle(Protocol):
    def give_way(self) -> None:
        """Ends the connection, and gives its place back at once."""


class Connections:
    """The connections of one listener, and their limits."""

    def __init__(self, max_connections: int, head_timeout_s: float) -> None:
        self.max_connections = max_connections
        self.head_timeout_s = head_timeout_s
        self.num = 0
        self.num_lingering = 0  # without a place
        self.idle: dict[Idle, None] = {}  # longest idle first

    def protocol(self, base: type[LimitedProtocol] | None = None) -> type[LimitedProtocol]:
        """What uvicorn makes for each connection; `base` is what else it does."""
        return type("LimitedProtocol", (base or LimitedProtocol,), {"limits": self})

    def has_room(self) -> bool:
        """Whether a new connection may stay; closes an idle one if that is what it takes."""
        if self.num < self.max_connections:
            return True
        metrics.router_refused.labels("connections").inc()
        if not self.idle:
            return False
        next(iter(self.idle)).give_way()
        return True


class LimitedProtocol(H11Protocol):
    limits: Connections

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, object],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._is_counted = False
        self.before_made: Callable[[], None] | None = None  # called before the connection is counted
        self._head_timer: asyncio.TimerHandle | None = None
        self._flush_timer: asyncio.TimerHandle | None = None
        self._on_gone: Callable[[], None] | None = None  # of the present request
        self._lingers_until: float | None = None  # the loop's time; the last answer was written
        self._linger_timer: asyncio.TimerHandle | None = None
        self._lingers_without_place = False
        self._num_late_bytes = 0
        self._app = self.app
        self.app = self._serve

    async def _serve(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """The application, with a short way for an answer's pieces."""
        cycle = self.cycle
        scope[ON_GONE] = functools.partial(self._watch, cycle)
        scope[TAKE_BODY] = functools.partial(_take_body, cycle)
        if cycle.more_body:
            cycle.transport = _ClosesLater(self)  # type: ignore[assignment]
            send = functools.partial(_send_early, cycle, send)
        if scope["http_version"] == "1.1" and scope["method"] != "HEAD":
            scope[WRITE_PIECE] = functools.partial(_write_piece, cycle)
            if _stays_open(scope["headers"]):
                send = functools.partial(self._send, cycle, send, [])
        try:
            await self._app(scope, receive, send)
        finally:
            scope.pop(WRITE_PIECE, None)  # it holds the cycle that holds the scope
            del scope[ON_GONE], scope[TAKE_BODY]

    async def _send(
        self, cycle: RequestResponseCycle, send: Send, start: list[dict[str, Any]], message: dict[str, Any]
    ) -> None:
        """Sends an answer at once if its length is known and one message has all of its body. h11 takes three events
        for that, and looks at each character of each header."""
        if message["type"] == "http.response.start" and not start:
            start.append(message)
            if _length(message["headers"]) is not None:
                return  # until the body comes
        elif message["type"] == "http.response.body" and len(start) == 1:
            head, body = start[0], message.get("body", b"")
            start.append(message)  # the head is sent once
            if (length := _length(head["headers"])) is not None:
                is_whole = length == b"%d" % len(body) and not message.get("more_body", False)
                if is_whole and cycle.flow.write_paused:
                    await cycle.flow.drain()
                if is_whole and self._is_alone(cycle) and self._writes_whole(cycle, head, body):
                    return
                await send(head)
        await send(message)

    def _is_alone(self, cycle: RequestResponseCycle) -> bool:
        """Whether all of the request was read and nothing after it, and the connection takes another one."""
        states = self.conn.our_state, self.conn.their_state
        is_done = states == (h11.SEND_RESPONSE, h11.DONE) and cycle.keep_alive and not cycle.disconnected
        return is_done and not self.conn.trailing_data[0]

    def _writes_whole(self, cycle: RequestResponseCycle, start: dict[str, Any], body: bytes) -> bool:
        """False if only h11 may say what is wrong with a header. h11 does not hear of the answer, and forgets the
        request: the connection is as good as new."""
        headers, status = [*cycle.default_headers, *start["headers"]], start["status"]
        lines = [b"%b: %b" % (name, value) for name, value in headers]
        head = b"\r\n".join([b"HTTP/1.1 %d %b" % (status, STATUS_PHRASES[status]), *lines])
        if head.count(b"\n") != len(headers) or head.count(b"\r") != len(headers) or b"\0" in head:
            return False
        self.transport.write(b"%b\r\n\r\n%b" % (head, body))
        cycle.response_started = cycle.response_complete = True
        cycle.waiting_for_100_continue = False
        cycle.message_event.set()
        self.conn = h11.Connection(h11.SERVER, self.config.h11_max_incomplete_event_size or MAX_HEAD_BYTES)
        cycle.on_response()
        return True

    def _watch(self, cycle: RequestResponseCycle, on_gone: Callable[[], None] | None) -> None:
        self._on_gone = on_gone
        if on_gone is not None:
            cycle.flow.resume_reading()  # a connection that is not read from is not seen to end
            if cycle.disconnected:
                self._tell_gone()

    def _tell_gone(self) -> None:
        if self._on_gone is not None:
            self.loop.call_soon(self._on_gone)
            self._on_gone = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.before_made is not None:
            self.before_made()
        if not self.limits.has_room():
            transport.write(FULL)
            if self.limits.num_lingering < MAX_LINGERING:
                self.limits.num_lingering += 1
                self._lingers_without_place = True
                self._linger(SILENT_S)
            else:
                transport.close()
            return
        self._is_counted = True
        self.limits.num += 1
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._flush_timer is not None:
            self._flush_timer.cancel()
        if self._linger_timer is not None:
            self._linger_timer.cancel()
        if self._lingers_without_place:
            self._lingers_without_place = False
            self.limits.num_lingering -= 1
        self._tell_gone()
        self._uncount()
        self.app = self._app  # what holds this connection, and is held by it, would wait for the garbage collector
        self.cycle = None  # type: ignore[assignment]  # as it is before the first request

    def _uncount(self) -> None:
        self._stop_timer()
        self.limits.idle.pop(self, None)
        if self._is_counted:
            self._is_counted = False
            self.limits.num -= 1

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._lingers_until is not None:
            self._throw_away(data, self._lingers_until)
            return
        super().data_received(data)
        their_state = self.conn.their_state
        # Nothing is read while requests wait in turn, except that each one reads on to see its client leave.
        if their_state is h11.DONE and len(self.conn.trailing_data[0]) > MAX_AHEAD_BYTES:
            metrics.router_refused.labels("read ahead").inc()
            self.transport.close()
        elif their_state is h11.SEND_BODY and self.conn.our_state is h11.DONE:
            self._count_late(data)
        self._look()

    def _count_late(self, data: bytes) -> None:
        """Of a body whose answer came before its end, on a connection that stays open for the next request."""
        self._num_late_bytes += len(data)
        if self._num_late_bytes > MAX_LATE_BYTES:
            self.transport.close()
        elif self.timeout_keep_alive_task is None:
            self.timeout_keep_alive_task = self.loop.call_later(SILENT_S, self.timeout_keep_alive_handler)

    def close_later(self) -> None:
        """Closes the connection after the end of the present request's body, if that is still to come."""
        if self.conn.their_state is h11.SEND_BODY:
            self._linger(self.limits.head_timeout_s)
        else:
            self.transport.close()

    def _linger(self, most_s: float) -> None:
        """Closes the connection once the client has, or its body has ended, or it has sent too much or for too long.
        Nothing is written any more."""
        if self.transport.is_closing() or self._lingers_until is not None:
            return
        self._num_late_bytes = 0
        self._lingers_until = self.loop.time() + most_s
        self._linger_timer = self.loop.call_later(min(most_s, SILENT_S), self._end_linger)
        self._unset_keepalive_if_required()
        self.flow.resume_reading()
        if self.transport.can_write_eof():  # not with TLS
            self.transport.write_eof()

    def _throw_away(self, data: bytes, until: float) -> None:
        self._num_late_bytes += len(data)
        left_s = until - self.loop.time()
        if self._linger_timer is not None:
            self._linger_timer.cancel()
        if left_s <= 0 or self._num_late_bytes > MAX_LATE_BYTES or self._ends_body(data):
            self._end_linger()
        else:
            self._linger_timer = self.loop.call_later(min(left_s, SILENT_S), self._end_linger)

    def _ends_body(self, data: bytes) -> bool:
        """Whether the present request's body has ended with `data`. Without such a request nobody can say so."""
        if self.conn.their_state is not h11.SEND_BODY:
            return False
        self.conn.receive_data(data)
        try:
            while isinstance(event := self.conn.next_event(), h11.Data):
                pass
        except h11.RemoteProtocolError:
            return True
        return event is not h11.NEED_DATA

    def _end_linger(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()
        self._look()

    def send_400_response(self, msg: str) -> None:
        """For bytes that are no HTTP. They may come behind a request's head: that one has no other answer then, and one
        that was begun is cut off."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            self._tell_gone()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.write(_closing(NotHttpError(msg)))
        if self.conn.our_state is h11.SEND_BODY:
            self.transport.close()
        else:
            self._linger(min(SILENT_S, self.limits.head_timeout_s))

    def on_response_complete(self) -> None:
        self._num_late_bytes = 0
        super().on_response_complete()
        if self._lingers_until is not None:
            self._unset_keepalive_if_required()
        self._look()

    def shutdown(self) -> None:
        if self._lingers_until is not None:
            self.transport.close()
        else:
            super().shutdown()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._look()

    def _look(self) -> None:
        """Keeps the timers and the list of idle connections true."""
        if self.transport.is_closing() and self._flush_timer is None:
            self._flush(self.transport.get_write_buffer_size())
        if not self._is_counted or self.transport.is_closing():
            self._stop_timer()
            self.limits.idle.pop(self, None)
            return
        if self._lingers_until is not None:
            self._stop_timer()
            self.limits.idle.setdefault(self)
            return
        is_idle = self.cycle is None or self.cycle.response_complete
        if not is_idle:
            self._stop_timer()
            self.limits.idle.pop(self, None)
        elif self._head_timer is None:
            self.limits.idle[self] = None
            self._head_timer = self.loop.call_later(self.limits.head_timeout_s, self._is_late)

    def _flush(self, num_left: int) -> None:
        """Looks later whether the client has taken more of the last answer, of which so many bytes are left. A
        connection that is closed would wait for that for ever, and keep its place."""
        self._flush_timer = self.loop.call_later(self.limits.head_timeout_s, self._look_at_flush, num_left)

    def _look_at_flush(self, num_before: int) -> None:
        num_left = self.transport.get_write_buffer_size()
        if 0 < num_left < num_before:
            self._flush(num_left)
        else:
            self.transport.abort()

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _is_late(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            if self.conn.their_state is h11.IDLE:
                metrics.router_refused.labels("head time").inc()
                self.transport.write(LATE)
                self._linger(min(SILENT_S, self.limits.head_timeout_s))
                self._look()
            else:
                self.give_way()

    def give_way(self) -> None:
        self._uncount()
        self.transport.close()
        self._look()


class _ClosesLater:
    """The transport of a request of which not all has come yet."""

    def __init__(self, connection: LimitedProtocol) -> None:
        transport = connection.transport
        self.write, self.is_closing, self.close = transport.write, transport.is_closing, connection.close_later


async def _send_early(cycle: RequestResponseCycle, send: Send, message: dict[str, Any]) -> None:
    """Sends the answer to a request of which not all has come. A client that waited for leave to send the body, and has
    none, need not send it: the connection cannot be used again."""
    if message["type"] == "http.response.start" and cycle.waiting_for_100_continue:
        message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
    await send(message)


def _stays_open(headers: Headers) -> bool:
    """Whether the connection of a request of HTTP/1.1 does."""
    return all(value.lower() == b"keep-alive" for name, value in headers if name == b"connection")


def _length(headers: Headers) -> bytes | None:
    """What an answer's headers say of its length; None if they say nothing, or that the connection is closed after
    it."""
    found = None
    for name, value in headers:
        if name == b"connection":
            return None
        if name == b"content-length":
            found = value
    return found


def _take_body(cycle: RequestResponseCycle) -> bytes | None:
    """What `cycle.receive` would give without waiting, as most bodies come with their request's head."""
    if cycle.more_body or cycle.disconnected or cycle.waiting_for_100_continue:
        return None
    cycle.message_event.clear()
    body, cycle.body = bytes(cycle.body), bytearray()
    return body


def _write_piece(cycle: RequestResponseCycle, data: bytes) -> Awaitable[None] | None:
    """Writes what an ASGI message with a part of the body would: one chunk of HTTP/1.1, once the client takes it. Its
    bytes depend on nothing that h11 keeps, so h11 hears of the answer's beginning and end alone."""
    if cycle.disconnected:
        return None
    if cycle.flow.write_paused:
        return _write_later(cycle, data)
    if data:
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
    return None


async def _write_later(cycle: RequestResponseCycle, data: bytes) -> None:
    await cycle.flow.drain()
    if data and not cycle.disconnected:
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
