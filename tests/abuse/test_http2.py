"""HTTP/2 as no gRPC library speaks it."""

from __future__ import annotations

import contextlib
import gzip
import random
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import h2.connection
import h2.errors
import hpack
import pytest

from protos.baton.v1 import inference_pb2, types_pb2
from tests.abuse.rude import MIB, PATIENCE_S, RUDE_KEY, Target, call, channel
from tests.abuse.vitals import Vitals

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = (
    0,
    1,
    3,
    4,
    5,
    6,
    7,
    8,
    9,
)
END_STREAM, ACK, END_HEADERS = 1, 1, 4
GENERATE = "/baton.v1.InferenceService/Generate"
ANSWER = inference_pb2.GenerateRequest(
    prompt="Hello", sampling_params=types_pb2.SamplingParams(max_tokens=2000, ignore_eos=True, logprobs=20)
).SerializeToString()
SHORT = inference_pb2.GenerateRequest(
    prompt="Hello", sampling_params=types_pb2.SamplingParams(max_tokens=1)
).SerializeToString()
SEND_S = 3.0
FLOODS_MIB = 384.0
"""That processes may grow by: gRPC's own, and nearly all of it comes from endless headers (130 MiB; other floods: 10 to
40). A connection whose client does not acknowledge gRPC's settings may send 16 MiB of them, and gRPC writes a status of
megabytes then."""
CALL = b"\x00" + struct.pack(">I", len(ANSWER)) + ANSWER


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def head(path: str = GENERATE, extra: tuple[tuple[str, str], ...] = ()) -> bytes:
    """Of one call; each block is complete by itself, so that any connection can send it at any time."""
    fields = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "x"), ("te", "trailers")]
    fields += [("content-type", "application/grpc"), ("authorization", f"Bearer {RUDE_KEY}"), *extra]
    encoder = hpack.Encoder()
    return bytes(encoder.encode([hpack.NeverIndexedHeaderTuple(*field) for field in fields], huffman=False))


@contextmanager
def connected(address: tuple[str, int], settings: bytes = b"") -> Iterator[socket.socket]:
    with socket.create_connection(address, timeout=PATIENCE_S) as connection:
        connection.sendall(PREFACE + frame(SETTINGS, 0, 0, settings))
        yield connection


def send_all(connection: socket.socket, data: bytes) -> None:
    """As long as it is taken; what comes back is thrown away. The peer may close at any time: that is its right."""
    connection.setblocking(False)
    view, end = memoryview(data), time.monotonic() + SEND_S
    with contextlib.suppress(ConnectionError):
        while view and time.monotonic() < end:
            with contextlib.suppress(BlockingIOError):
                view = view[connection.send(view) :]
            with contextlib.suppress(BlockingIOError):
                while got := connection.recv(1 << 20):
                    del got
            time.sleep(0.0005)


def streams(number: int) -> range:
    return range(1, 2 * number, 2)


def rapid_reset(rng: random.Random) -> bytes:
    reset = struct.pack(">I", h2.errors.ErrorCodes.CANCEL)
    return b"".join(frame(HEADERS, END_HEADERS, n, head()) + frame(RST_STREAM, 0, n, reset) for n in streams(5000))


def reset_with_data(rng: random.Random) -> bytes:
    reset = struct.pack(">I", h2.errors.ErrorCodes.CANCEL)
    return b"".join(
        frame(HEADERS, END_HEADERS, n, head()) + frame(DATA, END_STREAM, n, CALL) + frame(RST_STREAM, 0, n, reset)
        for n in streams(1000)
    )


def ping_flood(rng: random.Random) -> bytes:
    return frame(PING, 0, 0, b"12345678") * 100_000


def settings_flood(rng: random.Random) -> bytes:
    return b"".join(frame(SETTINGS, 0, 0, struct.pack(">HI", 4, rng.randrange(2**31))) for _ in range(50_000))


def window_flood(rng: random.Random) -> bytes:
    return frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", 1)) * 100_000


def empty_data_flood(rng: random.Random) -> bytes:
    return frame(HEADERS, END_HEADERS, 1, head()) + frame(DATA, 0, 1) * 100_000


def header_flood(rng: random.Random) -> bytes:
    large = head(extra=tuple((f"x-{n}", "x" * 900) for n in range(15)))
    return b"".join(frame(HEADERS, END_HEADERS | END_STREAM, n, large[:16_000]) for n in streams(500))


def endless_headers(rng: random.Random) -> bytes:
    return frame(HEADERS, 0, 1, head()) + frame(CONTINUATION, 0, 1, b"\x00\x01a\x01b" * 3000) * 100


def header_bomb(rng: random.Random) -> bytes:
    """One entry of the table of headers, referred to again and again: a few bytes for each 4 KB."""
    entry = b"\x40\x01a\x7f\x81\x1e" + b"x" * 4000  # 127 + 0x81-encoded rest: 4000 bytes
    return frame(HEADERS, END_HEADERS, 1, entry + b"\xbe" * 12_000)


def open_streams(rng: random.Random) -> bytes:
    """Calls whose message never comes."""
    return b"".join(frame(HEADERS, END_HEADERS, n, head()) for n in streams(3000))


def half_messages(rng: random.Random) -> bytes:
    """Each of a message that is said to be large, and does not go on."""
    part = b"\x00" + struct.pack(">I", 3 * MIB) + b"x" * 1000
    return b"".join(frame(HEADERS, END_HEADERS, n, head()) + frame(DATA, 0, n, part) for n in streams(1000))


def huge_messages(rng: random.Random) -> bytes:
    part = b"\x00" + struct.pack(">I", 2**32 - 1) + b"x" * 1000
    return b"".join(frame(HEADERS, END_HEADERS, n, head()) + frame(DATA, 0, n, part) for n in streams(500))


def unknown_paths(rng: random.Random) -> bytes:
    paths = ["/", "", "*", "/x", "//", "/a/b", "/baton.v1.InferenceService/", "/\x7f/\x7f", "/" + "x" * 5000]
    return b"".join(frame(HEADERS, END_HEADERS, n, head(rng.choice(paths))) for n in streams(1000))


def bad_frames(rng: random.Random) -> bytes:
    kind, length = rng.randrange(12), rng.randrange(64)
    return frame(kind, rng.randrange(256), rng.choice((0, 1, 2, 2**31 - 1)), rng.randbytes(length)) * 100


def compressed(rng: random.Random) -> bytes:
    """Messages that say they are compressed, and are not."""
    data = b"\x01" + CALL[1:]
    return b"".join(frame(HEADERS, END_HEADERS, n, head()) + frame(DATA, END_STREAM, n, data) for n in streams(300))


def zip_bombs(rng: random.Random) -> bytes:
    """Small messages that are huge once they are decompressed."""
    bomb = gzip.compress(bytes(64 * MIB))
    data = b"\x01" + struct.pack(">I", len(bomb)) + bomb
    parts = [data[at : at + 16_000] for at in range(0, len(data), 16_000)]
    frames = [frame(HEADERS, END_HEADERS, 1, head(extra=(("grpc-encoding", "gzip"),)))]
    return b"".join([*frames, *(frame(DATA, 0, 1, part) for part in parts), frame(DATA, END_STREAM, 1)])


FLOODS: tuple[Callable[[random.Random], bytes], ...] = (
    rapid_reset,
    reset_with_data,
    ping_flood,
    settings_flood,
    window_flood,
    empty_data_flood,
    header_flood,
    endless_headers,
    header_bomb,
    open_streams,
    half_messages,
    huge_messages,
    unknown_paths,
    bad_frames,
    compressed,
    zip_bombs,
)


def until_all_seen(target: Target) -> None:
    """Returns when the router has looked at every call of a flood: those of one method come to it in their order. Calls
    of two floods together would be more than may wait there (`MAX_PENDING_CALLS`), and gRPC cancels anybody's then."""
    with channel(target.grpc) as opened:
        call(opened, GENERATE, [SHORT])


@pytest.mark.growth_mib(FLOODS_MIB)
@pytest.mark.parametrize("port", ["grpc", "decode", "http"])
def test_floods(target: Target, vitals: Vitals, port: str) -> None:
    """Of the router's port, of a worker's, and of REST's, which speaks no HTTP/2; one after another."""
    address = target.host_port(getattr(target, port) if port != "http" else None)

    def abuse() -> None:
        for seed, flood in enumerate(FLOODS):
            with connected(address) as connection:
                send_all(connection, flood(random.Random(seed)))
            if port == "grpc":
                until_all_seen(target)
            assert not vitals.complaints(), (flood.__name__, vitals.complaints())

    vitals.until_at_rest(abuse)


def test_answers_without_room(target: Target, vitals: Vitals) -> None:
    """A hundred calls whose answers may not be sent: the client's window has no room for a byte."""
    no_room = struct.pack(">HI", 4, 0)  # SETTINGS_INITIAL_WINDOW_SIZE

    def abuse() -> None:
        with connected(target.host_port(target.grpc), no_room) as connection:
            calls = (frame(HEADERS, END_HEADERS, n, head()) + frame(DATA, END_STREAM, n, CALL) for n in streams(100))
            send_all(connection, b"".join(calls))
            time.sleep(3)

    vitals.until_at_rest(abuse)


def test_random_frames(target: Target, vitals: Vitals, fuzz_seconds: float) -> None:
    """A few frames in any order, of any kind, right or not."""
    end, seed = time.monotonic() + fuzz_seconds, 0
    addresses = [target.host_port(address) for address in (target.grpc, target.prefill, target.decode)]
    right = [
        frame(HEADERS, END_HEADERS, 1, head()),
        frame(DATA, 0, 1, CALL),
        frame(DATA, END_STREAM, 1, CALL[:7]),
        frame(RST_STREAM, 0, 1, bytes(4)),
        frame(SETTINGS, 0, 0, struct.pack(">HI", 3, 1)),
        frame(SETTINGS, ACK, 0),
        frame(PING, 0, 0, bytes(8)),
        frame(GOAWAY, 0, 0, bytes(8)),
        frame(WINDOW_UPDATE, 0, 1, b"\x7f\xff\xff\xff"),
        frame(HEADERS, END_HEADERS, 3, head("/grpc.health.v1.Health/Watch")),
        frame(DATA, 0, 3, bytes(5)),
    ]
    while time.monotonic() < end:
        seed += 1
        rng = random.Random(seed)
        parts = [rng.choice(right) if rng.random() < 0.7 else bad_frames(rng)[:99] for _ in range(rng.randrange(1, 12))]
        data = bytearray(b"".join(parts))
        for _ in range(rng.randrange(3)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        with connected(addresses[seed % 3]) as connection:
            send_all(connection, bytes(data))
            connection.settimeout(0.05)
            with contextlib.suppress(OSError):
                connection.recv(65536)
    assert seed > 3
