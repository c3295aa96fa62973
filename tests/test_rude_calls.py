"""What tests/abuse takes for the service's own fault, and what for its client library's word."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from tests.abuse.rude import Ending, channel, ending

HEADERS, RST_STREAM, SETTINGS, ACK = 1, 3, 4, 1
TIMEOUT_S = 30.0
PREFACE_BYTES, FRAME_HEAD_BYTES = 24, 9
INTERNAL = grpc.StatusCode.INTERNAL


def frame(kind: int, stream: int, payload: bytes = b"", flags: int = 0) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


@contextlib.contextmanager
def resetting() -> Iterator[str]:
    """The address of a server that resets the first call, without an error, instead of answering."""

    def serve(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        connection.settimeout(TIMEOUT_S)
        with connection, connection.makefile("rb") as received:
            connection.sendall(frame(SETTINGS, 0) + frame(SETTINGS, 0, flags=ACK))
            received.read(PREFACE_BYTES)
            kind = SETTINGS
            while kind != HEADERS:
                head = received.read(FRAME_HEAD_BYTES)
                assert len(head) == FRAME_HEAD_BYTES, "the client went away"
                kind = head[3]
                received.read(int.from_bytes(head[:3], "big"))
            connection.sendall(frame(RST_STREAM, 1, bytes(4)))
            with contextlib.suppress(ConnectionError):
                received.read()  # until the client closes

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            thread.join()


@contextlib.contextmanager
def failing() -> Iterator[str]:
    """The address of a server that ends each call with INTERNAL."""

    def fail(_: bytes, context: grpc.ServicerContext) -> bytes:
        context.abort(INTERNAL, "no idea")
        raise AssertionError("abort raises")

    with ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool)
        handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {"b": grpc.unary_unary_rpc_method_handler(fail)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("a", handlers),))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield f"127.0.0.1:{port}"
        server.stop(None).wait()


def test_what_a_server_says_is_its_fault() -> None:
    with failing() as address, channel(address) as opened:
        end = ending(opened, "/a/b", [b"x"])
    assert (end.code, end.details) == (INTERNAL, "no idea")
    assert end.is_our_fault
    assert "no idea" in str(end)


def test_a_reset_counts_unless_the_deadline_has_come() -> None:
    with resetting() as address, channel(address) as opened:
        end = ending(opened, "/a/b", [b"x"])
    assert end.code is INTERNAL, end  # the library's word for it
    assert end.is_our_fault
    assert not Ending(end.code, end.details, left_s=0.1).is_our_fault


@pytest.mark.parametrize(
    ("details", "is_our_fault"), [("gave up; last: Stream removed (RST_STREAM (code 0))", True), ("", True)]
)
def test_other_words_at_the_deadline_are_the_server_s(details: str, is_our_fault: bool) -> None:
    assert Ending(INTERNAL, details, left_s=0.0).is_our_fault == is_our_fault
