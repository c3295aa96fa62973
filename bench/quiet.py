"""A client that asks for little, one thing after another, and says how long each answer took.

A process of its own, so that it waits for the service alone:

    BATON_API_KEY=… python -m bench.quiet GRPC_ADDRESS HTTP_URL [SECONDS]

It asks for SECONDS, or until its standard input ends. If it is refused for now, it tries again after the delay that it
is told, and that counts as one answer. Prints `ready` after the first round, and one line of JSON in the end: the
latencies in seconds by what was asked, and the failures in words.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.client.sync_client import Client
from bench.load.http import Head, HttpConnections, request
from bench.processes import ready_client
from common.errors import BatonError, InternalError, OverloadedError

PATIENCE_S = 60.0
PAUSE_S = 0.05  # between two questions
MAX_TOKENS = 4


@dataclass(slots=True, frozen=True)
class Answers:
    latencies_s: Mapping[str, list[float]]
    failures: list[str]


class QuietClient:
    """Such a process, from when it has had its first answers. `stop` once."""

    def __init__(self, grpc_address: str, http_url: str, api_key: str = "") -> None:
        self._process = ready_client("bench.quiet", grpc_address, http_url, api_key=api_key)

    def stop(self) -> Answers:
        """After the answers to what is asked now."""
        output, _ = self._process.communicate()
        return Answers(**json.loads(output))


class _Asker:
    def __init__(self, grpc_address: str, http_url: str, api_key: str) -> None:
        self._url = http_url
        self._api_key = api_key
        self._client = Client(grpc_address, timeout=PATIENCE_S, api_key=api_key or None)
        self._channel = grpc.insecure_channel(grpc_address, options=[("grpc.enable_http_proxy", 0)])
        self.latencies_s: dict[str, list[float]] = {"grpc": [], "rest": [], "grpc health": [], "http health": []}
        self.failures: list[str] = []

    def ask_all(self) -> None:
        for name, ask in (
            ("grpc", self._generate),
            ("rest", self._complete),
            ("grpc health", self._check),
            ("http health", lambda: self._ask("GET", "/health")),
        ):
            begin = time.monotonic()
            try:
                _patiently(ask, begin + PATIENCE_S)
            except (BatonError, grpc.RpcError, OSError, ValueError) as error:
                self.failures.append(f"{name}, after {time.monotonic() - begin:.1f} s: {type(error).__name__}: {error}")
            else:
                self.latencies_s[name].append(time.monotonic() - begin)
            time.sleep(PAUSE_S)

    def _generate(self) -> None:
        answer = self._client.generate("Hello", max_tokens=MAX_TOKENS, ignore_eos=True, temperature=0.0).result()
        if len(answer.token_ids) != MAX_TOKENS:
            raise ValueError(f"{len(answer.token_ids)} tokens")

    def _complete(self) -> None:
        body = {"prompt": "Hello", "max_tokens": MAX_TOKENS, "ignore_eos": True, "temperature": 0.0}
        answer = json.loads(self._ask("POST", "/v1/completions", json.dumps(body).encode()))
        if answer["usage"]["completion_tokens"] != MAX_TOKENS:
            raise ValueError(str(answer["usage"]))

    def _check(self) -> None:
        request = health_pb2.HealthCheckRequest()
        status = health_pb2_grpc.HealthStub(self._channel).Check(request, timeout=PATIENCE_S).status
        if status != health_pb2.HealthCheckResponse.SERVING:
            raise ValueError(f"health is {status}")

    def _ask(self, method: str, path: str, body: bytes = b"") -> bytes:
        head, answer = asyncio.run(self._answer(request(method, path, body, api_key=self._api_key)))
        if head.status == 200:
            return answer
        reason = f"{head.status} {head.phrase}"
        if head.status in (429, 503) and (delay := head.fields.get("retry-after")):
            raise OverloadedError(reason, retry_after_s=float(delay))
        raise InternalError(reason)

    async def _answer(self, asked: bytes) -> tuple[Head, bytes]:
        """On a new connection: whether the server takes one is part of the question."""
        connections = HttpConnections(self._url)
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await connections.whole(asked)
        finally:
            connections.close()


def _patiently(ask: Callable[[], object], give_up_at: float) -> None:
    while True:
        try:
            ask()
        except OverloadedError as error:
            delay_s = error.retry_after_s or 1.0
            if time.monotonic() + delay_s > give_up_at:
                raise
            time.sleep(delay_s)
        else:
            return


def _await_end(done: threading.Event) -> None:
    sys.stdin.read()
    done.set()


def main() -> int:
    grpc_address, http_url, *seconds = sys.argv[1:]
    asker = _Asker(grpc_address, http_url, os.environ.get("BATON_API_KEY", ""))
    asker.ask_all()
    print("ready", flush=True)
    done = threading.Event()
    if seconds:
        threading.Timer(float(seconds[0]), done.set).start()
    else:
        threading.Thread(target=_await_end, args=(done,), daemon=True).start()
    while not done.is_set():
        asker.ask_all()
    print(json.dumps({"latencies_s": asker.latencies_s, "failures": asker.failures}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
