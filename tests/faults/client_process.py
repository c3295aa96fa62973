"""A client in a process of its own, so that it can be killed, stopped and cut off.

`python -m tests.faults.client_process`
reads one `Ask` a line from standard input, or `"cancel"`; writes one `Told` a line. It asks as users do: with
`baton.Client` over gRPC, or REST with a streamed answer.
"""

from __future__ import annotations

import http.client
import socket
import sys
import threading
from collections.abc import Callable, Iterator

import msgspec

from baton.client.sync_client import Client
from common.errors import BatonError
from common.targets import LatencyTargets


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """One request. A `router` that is a URL is asked over REST."""

    router: str
    request_id: str
    prompt: list[int]
    max_tokens: int
    cache_salt: str
    timeout_s: float
    ttft_ms: float | None = None  # latency targets; both or none
    tpot_ms: float | None = None


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """What the client knows so far; the last one of a request has `outcome`."""

    num_tokens: int
    outcome: str = ""  # OK, or the gRPC status; for REST, the error's type
    message: str = ""
    token_ids: tuple[int, ...] = ()
    decode_worker: str = ""
    prefill_worker: str = ""
    fallback_reason: str = ""
    num_retries: int = 0
    num_migrations: int = 0
    num_blocks_moved: int = 0


Canceller = Callable[[Callable[[], object]], None]  # is told how to cancel
_decoder = msgspec.json.Decoder(Ask | str)


def over_grpc(ask: Ask, on_cancel: Canceller) -> Iterator[Told]:
    token_ids: list[int] = []
    with Client(ask.router, timeout=ask.timeout_s) as client:
        answer = client.generate(
            ask.prompt,
            request_id=ask.request_id,
            cache_salt=ask.cache_salt,
            temperature=0.0,
            max_tokens=ask.max_tokens,
            ignore_eos=True,
            slo=None if ask.ttft_ms is None else LatencyTargets(ask.ttft_ms, ask.tpot_ms),
        )
        on_cancel(answer.cancel)
        try:
            for chunk in answer:
                token_ids += chunk.token_ids
                yield Told(num_tokens=len(token_ids))
        except BatonError as error:
            ids = tuple(token_ids)
            yield Told(num_tokens=len(ids), outcome=error.grpc_code, message=error.message, token_ids=ids)
            return
        report = answer.result().report
        yield Told(
            num_tokens=len(token_ids),
            outcome="OK",
            token_ids=tuple(token_ids),
            decode_worker=report.decode_worker,
            prefill_worker=report.prefill_worker,
            fallback_reason=report.fallback_reason,
            num_retries=report.num_retries,
            num_migrations=report.num_migrations,
            num_blocks_moved=report.num_blocks_moved,
        )


def over_rest(ask: Ask, on_cancel: Canceller) -> Iterator[Told]:
    """Counts events; as logprobs are asked for, each token is in one."""
    body = {
        "prompt": ask.prompt,
        "max_tokens": ask.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "cache_salt": ask.cache_salt,
        "request_id": ask.request_id,
        "logprobs": 0,
        "stream": True,
    }
    if ask.ttft_ms is not None:
        body["slo"] = {"ttft_ms": ask.ttft_ms, "tpot_ms": ask.tpot_ms}
    num_tokens, cancelled = 0, threading.Event()
    connection = http.client.HTTPConnection(ask.router.removeprefix("http://"), timeout=ask.timeout_s)
    try:
        connection.connect()

        def cancel() -> None:
            cancelled.set()
            connection.sock.shutdown(socket.SHUT_RDWR)  # which is how a REST client cancels

        on_cancel(cancel)
        connection.request("POST", "/v1/completions", msgspec.json.encode(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            text = response.read()
            yield Told(num_tokens=0, outcome=_type_of(text), message=text.decode())
            return
        for line in response:
            data = line.removeprefix(b"data: ")
            if data.startswith(b'{"error"'):
                yield Told(num_tokens=num_tokens, outcome=_type_of(data), message=data.decode())
                return
            if data.startswith(b"{"):
                num_tokens += 1
                yield Told(num_tokens=num_tokens)
        outcome = "CANCELLED" if cancelled.is_set() else "OK"
        yield Told(num_tokens=num_tokens, outcome=outcome)
    except (http.client.HTTPException, OSError) as error:
        outcome = "CANCELLED" if cancelled.is_set() else "UNAVAILABLE"
        yield Told(num_tokens=num_tokens, outcome=outcome, message=f"{type(error).__name__}: {error}")
    finally:
        connection.close()


def _type_of(body: bytes) -> str:
    return str(msgspec.json.decode(body)["error"]["type"])


class Session:
    """Reads requests, one at a time, and cancels meanwhile."""

    def __init__(self) -> None:
        self._cancel: Callable[[], object] = lambda: None
        self._asked: list[Ask] = []
        self._news = threading.Condition()
        self._is_closed = False

    def read(self) -> None:
        for line in sys.stdin:
            message = _decoder.decode(line)
            if isinstance(message, str):
                self._cancel()
                continue
            with self._news:
                self._asked.append(message)
                self._news.notify()
        with self._news:
            self._is_closed = True
            self._news.notify()
        self._cancel()

    def serve(self) -> None:
        while True:
            with self._news:
                self._news.wait_for(lambda: self._asked or self._is_closed)
                if not self._asked:
                    return
                ask = self._asked.pop(0)
            told = over_rest if ask.router.startswith("http") else over_grpc
            for item in told(ask, self._set_cancel):
                sys.stdout.write(msgspec.json.encode(item).decode() + "\n")
                sys.stdout.flush()

    def _set_cancel(self, cancel: Callable[[], object]) -> None:
        self._cancel = cancel


def main() -> None:
    session = Session()
    threading.Thread(target=session.read, daemon=True).start()
    session.serve()


if __name__ == "__main__":
    main()
