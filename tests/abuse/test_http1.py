"""HTTP/1.1 as no library speaks it."""

from __future__ import annotations

import contextlib
import random
import socket
import time
from collections import Counter
from collections.abc import Callable

import pytest

from tests.abuse.rude import PATIENCE_S, RUDE_KEY, Target, at_once
from tests.abuse.vitals import Vitals

HOST = b"Host: x\r\nAuthorization: Bearer " + RUDE_KEY.encode() + b"\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\n" + HOST
JSON = b'{"prompt": "x", "max_tokens": 2}'
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
WHOLE = POST + b"Content-Length: %d\r\n\r\n" % len(JSON) + JSON
NUM_PIPELINED = 300
LATE = 408  # after an answer, too: a connection without a question

# What is sent, whether the client then says that it is done, and the statuses that are right. No status: closed.
BYTES: dict[str, tuple[bytes, set[int]]] = {
    "nothing": (b"", {408}),
    "a slow head": (b"GET /health HTTP/1.1\r\nHost: x\r\nX-Slow: ", {408}),
    "a slow body": (POST + b"Content-Length: 50\r\n\r\n{", {408}),
    "a large head": (b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"x" * 100_000, {400}),
    "many headers": (b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"a: b\r\n" * 20_000 + b"\r\n", {400, 431}),
    "a large head at once": (b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"x" * 50_000 + b"\r\n\r\n", {400, 431}),
    "no HTTP": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 50 + b"\r\n\r\n", {400}),
    "HTTP/2 at once": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9), {400, 401}),
    "HTTP/0.9": (b"GET /\r\n\r\n", {400}),
    "a bad version": (b"GET / HTTP/9.9\r\nHost: x\r\n\r\n", {400, 401, 505}),
    "no host": (b"GET /health HTTP/1.1\r\n\r\n", {400}),
    "two lengths": (POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n{}", {400}),
    "a negative length": (POST + b"Content-Length: -5\r\n\r\n{}", {400}),
    "a length of letters": (POST + b"Content-Length: many\r\n\r\n{}", {400}),
    "a length beyond all": (POST + b"Content-Length: " + b"9" * 19 + b"\r\n\r\n{}", {400, 408, 413}),
    "both lengths": (POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", {400}),
    "an unknown encoding": (POST + b"Transfer-Encoding: gzip\r\n\r\n{}", {400, 501}),
    "a bad chunk": (CHUNKED + b"zz\r\n{}\r\n0\r\n\r\n", {400}),
    "a negative chunk": (CHUNKED + b"-2\r\n{}\r\n0\r\n\r\n", {400}),
    "a huge chunk": (CHUNKED + b"F" * 16 + b"\r\n{}", {400, 408}),
    "a long chunk extension": (CHUNKED + b"2;" + b"x" * 100_000, {400}),
    "a chunk that is too long": (CHUNKED + b"2\r\n{}}}}\r\n0\r\n\r\n", {400}),
    "many chunks of a byte": (CHUNKED + b"1\r\n \r\n" * 5000 + b"0\r\n\r\n", {400}),
    "many trailers": (CHUNKED + b"2\r\n{}\r\n0\r\n" + b"a: b\r\n" * 20_000 + b"\r\n", {400}),
    "header without a name": (b"GET /health HTTP/1.1\r\nHost: x\r\n: x\r\n\r\n", {400}),
    "a folded header": (b"GET /health HTTP/1.1\r\nHost: x\r\nA: b\r\n c\r\n\r\n", {200, 400}),
    "a zero byte": (b"GET /\x00 HTTP/1.1\r\nHost: x\r\n\r\n", {400}),
    "expects to go on": (POST + b"Expect: 100-continue\r\nContent-Length: 50\r\n\r\n", {100, 408}),
    "an upgrade": (b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n", {200, 400}),
    "a method of its own": (b"BREW /v1/completions HTTP/1.1\r\n" + HOST + b"\r\n", {400, 405}),
    "pipelined questions": (b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * NUM_PIPELINED, {200}),
    "pipelined requests": (WHOLE * 20, {200}),
    "pipelined rubbish": (WHOLE + b"rubbish\r\n\r\n", {200, 400}),
}


def exchange(target: Target, data: bytes) -> set[int]:
    """The statuses of all that comes back until there is no more for a while, or the connection is closed."""
    with socket.create_connection(target.host_port(), timeout=PATIENCE_S) as connection:
        got = b""
        with contextlib.suppress(ConnectionError):
            connection.sendall(data)
            connection.settimeout(6)  # more than the router waits for the rest of a request
            with contextlib.suppress(TimeoutError):
                while more := connection.recv(65536):
                    got += more
    return {int(part[:3]) for part in got.split(b"HTTP/1.1 ")[1:]}


def test_bytes(target: Target, vitals: Vitals) -> None:
    """All at once, each a few times."""
    names = list(BYTES) * 3
    found = at_once(len(names), lambda n: (names[n], frozenset(exchange(target, BYTES[names[n]][0]))), 40)
    wrong = {name: sorted(got) for name, got in found if not got <= BYTES[name][1] | {LATE}}
    assert not wrong


def test_pipelined_questions_are_all_answered(target: Target, vitals: Vitals) -> None:
    with socket.create_connection(target.host_port(), timeout=PATIENCE_S) as connection:
        connection.sendall(BYTES["pipelined questions"][0])
        got = b""
        while got.count(b"HTTP/1.1 200") < NUM_PIPELINED:
            more = connection.recv(65536)
            assert more, got[-500:]
            got += more


HOLD: dict[str, Callable[[int], bytes]] = {
    "silent connections": lambda _: b"",
    "slow heads": lambda n: b"GET /health HTTP/1.1\r\nX: " + b"x" * n,
    "slow bodies": lambda n: POST + b"Content-Length: 9999\r\n\r\n" + b"x" * n,
    "answers that nobody takes": lambda _: WHOLE * 200,
}


@pytest.mark.parametrize("name", HOLD)
def test_many_connections_that_go_on(target: Target, vitals: Vitals, name: str) -> None:
    """Half as many again as the router keeps; each sends one more byte now and then."""

    def abuse() -> None:
        opened = []
        for number in range(1500):
            connection = socket.socket()
            connection.setblocking(False)
            connection.connect_ex(target.host_port())
            opened.append((connection, HOLD[name](number % 50)))
            if number % 100 == 0:
                time.sleep(0.05)
        for turn in range(2):
            for connection, data in opened:
                with contextlib.suppress(OSError):
                    connection.send(data if turn == 0 else b"x")
            time.sleep(1)
        for connection, _ in opened:
            connection.close()

    vitals.until_at_rest(abuse)


def test_random_bytes(target: Target, vitals: Vitals, fuzz_seconds: float) -> None:
    """What is right, with some of it changed, cut or said twice."""
    end, statuses = time.monotonic() + fuzz_seconds, Counter[int]()
    for seed in range(10**9):
        if time.monotonic() >= end:
            break
        rng = random.Random(seed)
        data = bytearray(rng.choice([data for data, _ in BYTES.values() if 0 < len(data) < 5000] + [WHOLE] * 9))
        for _ in range(rng.randrange(4)):
            at = rng.randrange(len(data))
            match rng.randrange(4):
                case 0:
                    data[at] = rng.randrange(256)
                case 1:
                    del data[at : at + rng.randrange(20)]
                case 2:
                    data[at:at] = data[at : at + 50]
                case _:
                    data[at:at] = rng.choice([b"\r\n", b"\r\n\r\n", b"\x00", b"Content-Length: 1\r\n", b"\xff" * 9])
            if not data:
                break
        with socket.create_connection(target.host_port(), timeout=PATIENCE_S) as connection:
            got = b""
            with contextlib.suppress(ConnectionError):
                connection.sendall(data)
                connection.shutdown(socket.SHUT_WR)
                while more := connection.recv(65536):
                    got += more
        found = [int(part[:3]) for part in got.split(b"HTTP/1.1 ")[1:]]
        statuses.update(found)
        assert not [status for status in found if status >= 500 and status not in (501, 505)], (seed, bytes(data), got)
    assert statuses
