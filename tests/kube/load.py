"""Clients that ask one question after another while something happens to the cluster, and keep count."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType

from baton.client.sync_client import Client
from common.errors import BatonError, UnavailableError

QUESTIONS = ("What is the capital of Japan?", "Name three colours.", "Count from one to ten.")
MAX_TOKENS = 16


def ask_rest(port: int, question: str, max_tokens: int = MAX_TOKENS) -> str:
    body = {
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": max_tokens,
        "cache_salt": uuid.uuid4().hex,  # nothing is cached: every prompt needs a prefill worker
    }
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        text: str = json.load(answer)["choices"][0]["message"]["content"]
    return text


@dataclass
class Load:
    """A few clients of each kind. Leaving waits for the answers under way.

    gRPC clients keep one connection for all their requests, REST clients make one for each. They retry nothing, unless
    `ask_again`: then a broken connection is no failure, but counts as `num_broken`.
    """

    http_port: int
    grpc_port: int
    num_clients: int = 1  # of each kind
    interfaces: tuple[str, ...] = ("rest", "grpc")
    max_tokens: int = MAX_TOKENS
    ask_again: bool = False
    num_answers: int = 0
    num_broken: int = 0
    failures: list[str] = field(default_factory=list)
    expected: dict[str, str] = field(default_factory=dict)
    defects: list[Exception] = field(default_factory=list)  # of the clients themselves, which ended by them

    def __enter__(self) -> Load:
        self.expected = {question: ask_rest(self.http_port, question, self.max_tokens) for question in QUESTIONS}
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._run, args=(client, number))
            for number in range(self.num_clients)
            for interface, client in (("rest", self._ask_rest), ("grpc", self._ask_grpc))
            if interface in self.interfaces
        ]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        self._raise_defects()

    def more_answers(self, number: int, timeout_s: float = 300) -> None:
        """Waits until `number` more questions have been answered."""
        goal, deadline = self.num_answers + number, time.monotonic() + timeout_s
        while self.num_answers < goal:
            self._raise_defects()
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.num_answers} answers after {timeout_s:g} s; failures: {self.failures}")
            time.sleep(0.05)

    def _run(self, client: Callable[[int], None], number: int) -> None:
        try:
            client(number)
        except Exception as error:
            self.defects.append(error)

    def _raise_defects(self) -> None:
        if self.defects:
            raise ExceptionGroup("clients ended", self.defects)

    def _count(self, question: str, text: str, interface: str) -> None:
        with self._lock:
            self.num_answers += 1
            if text != self.expected[question]:
                self.failures.append(f"{interface}: a wrong answer to {question!r}: {text!r}")

    def _ask_rest(self, number: int) -> None:
        while not self._stop.is_set():
            number += 1
            question = QUESTIONS[number % len(QUESTIONS)]
            try:
                self._count(question, ask_rest(self.http_port, question, self.max_tokens), "REST")
            except urllib.error.HTTPError as error:
                with error:
                    self.failures.append(f"REST: {error} {error.read().decode()}")
                time.sleep(0.2)
            except OSError as error:
                self._broke(f"REST: {error}")

    def _ask_grpc(self, number: int) -> None:
        with Client(f"127.0.0.1:{self.grpc_port}", timeout=120) as client:
            while not self._stop.is_set():
                number += 1
                question = QUESTIONS[number % len(QUESTIONS)]
                try:
                    answer = client.chat(
                        question, temperature=0.0, max_tokens=self.max_tokens, cache_salt=uuid.uuid4().hex
                    )
                    self._count(question, "".join(chunk.text for chunk in answer), "gRPC")
                except UnavailableError as error:
                    self._broke(f"gRPC: {error.message}")
                except BatonError as error:
                    self.failures.append(f"gRPC: {error.grpc_code}: {error.message}")
                    time.sleep(0.2)

    def _broke(self, what: str) -> None:
        with self._lock:
            if self.ask_again:
                self.num_broken += 1
            else:
                self.failures.append(what)
        time.sleep(0.2)


@contextmanager
def busy(port: int, *, num_clients: int, num_prompt_tokens: int, num_output_tokens: int) -> Iterator[None]:
    """Requests of one shape, without end, over gRPC. Raises ExceptionGroup if any failed."""

    def ask(number: int, stop: threading.Event) -> None:
        with Client(f"127.0.0.1:{port}", timeout=600) as client:
            while not stop.is_set():
                number += 100
                prompt = [100 + (number * 7 + i * number) % 290 for i in range(num_prompt_tokens)]
                client.generate(prompt, max_tokens=num_output_tokens, ignore_eos=True, temperature=0.0).result()

    with at_once(num_clients, ask):
        yield


@contextmanager
def at_once(num_clients: int, ask: Callable[[int, threading.Event], None]) -> Iterator[None]:
    """Clients in threads, each with its number, which ask until the event is set, as it is on leaving.

    Raises ExceptionGroup if any failed, whatever else was raised; the others go on meanwhile.
    """
    stop = threading.Event()
    failures: list[Exception] = []

    def run(number: int) -> None:
        try:
            ask(number, stop)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(num_clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        if failures:
            raise ExceptionGroup("requests failed", failures)
