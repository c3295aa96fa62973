"""Clients that do to a router what no client should, as fast as they can. Each is a process of its own:

    BATON_API_KEY=… python -m bench.rude KIND GRPC_ADDRESS HTTP_URL

It goes on until its standard input ends, whatever it is answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import sys
import threading
import time
from collections.abc import Callable

import grpc

from bench.load.http import HttpConnections, request
from common.errors import BatonError
from protos.baton.v1 import inference_pb2, inference_pb2_grpc, types_pb2

GENERATE = b"/baton.v1.InferenceService/Generate"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
NUM_RESETS = 1000  # streams of one connection
NUM_SLOW = 200  # connections
NUM_LARGE = 100_000  # elements of a list
NUM_THREADS = 8


class Rude:
    def __init__(self, grpc_address: str, http_url: str, api_key: str) -> None:
        self._grpc = grpc_address
        self._url, self._http = http_url, http_url.removeprefix("http://")
        self._api_key = api_key
        self._authorization = f"Bearer {api_key}"
        self._channel = grpc.insecure_channel(grpc_address, options=[("grpc.enable_http_proxy", 0)])
        self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self._slow: list[socket.socket] = []

    def reset_streams(self) -> None:
        """HTTP/2 rapid reset: calls that are cancelled right after they were opened."""
        fields = {b":method": b"POST", b":scheme": b"http", b":path": GENERATE, b":authority": b"x"}
        fields |= {b"content-type": b"application/grpc", b"authorization": self._authorization.encode()}
        block = b"".join(b"\x00" + bytes([len(k)]) + k + bytes([len(v)]) + v for k, v in fields.items())
        frames = [PREFACE]
        for stream in range(1, 2 * NUM_RESETS, 2):
            number = stream.to_bytes(4, "big")
            frames.append(len(block).to_bytes(3, "big") + b"\x01\x04" + number + block)
            frames.append(b"\x00\x00\x04\x03\x00" + number + (8).to_bytes(4, "big"))
        with socket.create_connection(_host_port(self._grpc), timeout=60) as connection:
            connection.sendall(b"".join(frames))
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(1 << 20):
                pass

    def cancel_calls(self) -> None:
        """Requests that are cancelled at any moment."""
        params = types_pb2.SamplingParams(max_tokens=100, ignore_eos=True)
        request = inference_pb2.GenerateRequest(prompt="Hello", sampling_params=params)
        call = self._stub.Generate(request, metadata=(("authorization", self._authorization),))
        time.sleep(random.uniform(0, 0.05))
        call.cancel()

    def send_nonsense(self) -> None:
        """Messages that are none."""
        method: grpc.UnaryUnaryMultiCallable[bytes, bytes] = self._channel.unary_unary(GENERATE.decode())
        method(random.randbytes(random.randrange(300)), metadata=(("authorization", self._authorization),), timeout=60)

    def send_large_bodies(self) -> None:
        """Long lists of what is wrong."""
        path = random.choice(("/v1/chat/completions", "/v1/messages"))
        self._post(path, b'{"messages": [' + b"1," * NUM_LARGE + b"1]}")

    def ask_without_key(self) -> None:
        next(iter(self._stub.Generate(inference_pb2.GenerateRequest(prompt="x"), timeout=60)))

    def send_slowly(self) -> None:
        """Bodies of which a byte comes now and then."""
        while len(self._slow) < NUM_SLOW:
            connection = socket.create_connection(_host_port(self._http), timeout=60)
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: {self._authorization}\r\n"
            connection.sendall(f"{head}Content-Length: 9999\r\n\r\n".encode())
            self._slow.append(connection)
        time.sleep(0.01)
        connection = self._slow.pop(0)
        connection.sendall(b" ")
        self._slow.append(connection)

    def _post(self, path: str, body: bytes) -> None:
        asyncio.run(self._answered(request("POST", path, body, api_key=self._api_key)))

    async def _answered(self, asked: bytes) -> None:
        connections = HttpConnections(self._url)
        with contextlib.closing(connections):
            async with asyncio.timeout(60):
                await connections.whole(asked)


KINDS: dict[str, tuple[Callable[[Rude], None], int]] = {  # what is done again and again, on how many threads
    "rapid reset": (Rude.reset_streams, 2),
    "cancelled calls": (Rude.cancel_calls, NUM_THREADS),
    "nonsense": (Rude.send_nonsense, NUM_THREADS),
    "large bodies": (Rude.send_large_bodies, 2),
    "no key": (Rude.ask_without_key, NUM_THREADS),
    "slow bodies": (Rude.send_slowly, 1),
}


def _host_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


def main() -> int:
    kind, grpc_address, http_url = sys.argv[1:]
    rude = Rude(grpc_address, http_url, os.environ["BATON_API_KEY"])
    act, num_threads = KINDS[kind]

    def go_on() -> None:
        while True:
            with contextlib.suppress(grpc.RpcError, OSError, BatonError):  # refused, as it should be
                act(rude)

    for _ in range(num_threads):
        threading.Thread(target=go_on, daemon=True).start()
    sys.stdin.read()
    os._exit(0)  # its threads go on for ever, and may hold locks that an orderly end waits for


if __name__ == "__main__":
    sys.exit(main())
