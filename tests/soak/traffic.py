"""Requests as they come from many users: some over gRPC, some over REST, at moments that nobody planned."""

from __future__ import annotations

import http.client
import json
import queue
import random
import socket
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field

from baton.client.sync_client import Client
from tests.chaos.cases import Case
from tests.chaos.load import REQUEST_TIMEOUT_S, ClientThread, Tally
from tests.integration.stack import Fleet

NUM_CLIENTS = 32  # requests in flight at most; what arrives beyond that waits, and its wait counts
SLO_S = 10.0  # an answer that takes longer is no goodput
REST_SHARE = 0.3

_NextArrival = Callable[[], float | None]  # blocks until a request is due; when it was; None: there are no more


@dataclass(slots=True, frozen=True)
class Traffic:
    """What is asked, and what has to come back: token ids over gRPC, text over REST."""

    routers: list[tuple[str, str]]  # addresses of gRPC and REST; clients share them
    cases: list[Case]
    wanted: list[tuple[int, ...]]
    texts: list[str]

    @classmethod
    def of(cls, fleet: Fleet, cases: list[Case], wanted: list[tuple[int, ...]]) -> Traffic:
        """Texts are those that came over gRPC with the wanted tokens. Raises `AssertionError` for other tokens."""
        texts = []
        with fleet.client() as client:
            for case, answer in zip(cases, wanted, strict=True):
                result = client.generate(
                    case.prompt,
                    temperature=case.temperature,
                    seed=case.seed,
                    max_tokens=case.max_tokens,
                    ignore_eos=True,
                    cache_salt="text",
                ).result()
                assert result.token_ids == answer, "the undisturbed fleet gives another answer than the reference"
                texts.append(result.text)
        routers = [(router.grpc, router.http.removeprefix("http://")) for router in fleet.routers]
        return cls(routers, cases, wanted, texts)


@dataclass(slots=True)
class Latencies:
    """Of right answers: when they were asked for, and for how many seconds they were waited for."""

    found: list[tuple[float, float]] = field(default_factory=list)

    def add(self, arrived_at: float, seconds: float) -> None:
        self.found.append((arrived_at, seconds))  # atomic: no lock


class MixedClient(ClientThread):
    """Asks when a request is due, over gRPC or REST."""

    def __init__(
        self, traffic: Traffic, tally: Tally, latencies: Latencies, seed: int, next_arrival: _NextArrival
    ) -> None:
        grpc, self._rest = traffic.routers[seed % len(traffic.routers)]  # seeds of clients follow each other
        super().__init__(grpc, traffic.cases, traffic.wanted, tally, seed, end_at=float("inf"))
        self._traffic, self._latencies, self._next_arrival = traffic, latencies, next_arrival

    def run(self) -> None:
        try:
            with Client(self._router, timeout=REQUEST_TIMEOUT_S) as patient:
                while (arrived_at := self._next_arrival()) is not None:
                    if self._one(patient) == "equal":
                        self._latencies.add(arrived_at, time.monotonic() - arrived_at)
        except Exception:
            self._tally.add("client error", traceback.format_exc())

    @property
    def is_asking(self) -> bool:
        return self._answer is not None

    def _whole(self, client: Client, index: int, salt: str) -> str:
        if self._rng.random() < REST_SHARE:
            return self._over_rest(index, salt)
        return super()._whole(client, index, salt)

    def _over_rest(self, index: int, salt: str) -> str:
        case = self._cases[index]
        body = {
            "prompt": case.prompt,
            "temperature": case.temperature,
            "seed": case.seed,
            "max_tokens": case.max_tokens,
            "ignore_eos": True,
            "cache_salt": salt,
            "stream": self._rng.random() < 0.5,
        }
        self._was_cancelled = False
        connection = http.client.HTTPConnection(self._rest, timeout=REQUEST_TIMEOUT_S)
        try:
            connection.connect()
            self._answer = _RestCall(connection)
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            data = response.read()
            text, problem = _text_of(response.status, data, is_stream=bool(body["stream"]))
        except (OSError, http.client.HTTPException) as error:
            text, problem = "", f"{type(error).__name__}: {error}"
        finally:
            self._answer = None
            connection.close()
        if problem or text != self._traffic.texts[index]:
            if self._was_cancelled:
                return self._tally.add("cancelled")
            outcome = "lost" if problem else "wrong"
            return self._tally.add(outcome, f"case {index} over REST: {problem or text!r}")
        return self._tally.add("equal")


class _RestCall:
    """What `ClientThread.cancel` ends."""

    def __init__(self, connection: http.client.HTTPConnection) -> None:
        self._connection = connection

    def cancel(self) -> None:
        sock: socket.socket | None = self._connection.sock
        if sock is not None:
            sock.shutdown(socket.SHUT_RDWR)


def _text_of(status: int, data: bytes, *, is_stream: bool) -> tuple[str, str]:
    """The answer's text, and what is wrong with it."""
    if status != 200:
        return "", f"{status}: {data[:500].decode(errors='replace')}"
    if not is_stream:
        return json.loads(data)["choices"][0]["text"], ""
    events = [line.removeprefix(b"data: ") for line in data.splitlines() if line.startswith(b"data: ")]
    if not events or events[-1] != b"[DONE]":
        return "", f"the stream broke off: {data[-500:].decode(errors='replace')}"
    bodies = [json.loads(event) for event in events[:-1]]
    if errors := [body["error"] for body in bodies if "error" in body]:
        return "", str(errors[0])
    return "".join(choice["text"] for body in bodies for choice in body["choices"]), ""


class OpenLoop:
    """Arrivals at random moments, `rate` a second on average, whether or not the former ones are answered."""

    def __init__(self, traffic: Traffic, rate: float, seed: int, end_at: float) -> None:
        self.tally, self.latencies = Tally(), Latencies()
        self.num_arrivals = 0
        self._rate, self._rng, self._end_at = rate, random.Random(seed), end_at
        self._due: queue.SimpleQueue[float | None] = queue.SimpleQueue()
        self.clients = [
            MixedClient(traffic, self.tally, self.latencies, seed + number, self._due.get)
            for number in range(NUM_CLIENTS)
        ]
        self._arrivals = threading.Thread(target=self._arrive, name="arrivals", daemon=True)

    def start(self) -> None:
        for thread in (*self.clients, self._arrivals):
            thread.start()

    def cancel_one(self, rng: random.Random) -> bool:
        asking = [client for client in self.clients if client.is_asking]
        return bool(asking) and rng.choice(asking).cancel()

    @property
    def num_waiting(self) -> int:
        """Arrived, and not asked yet."""
        return self._due.qsize()

    def join(self) -> list[str]:
        """Waits for the last answers; who hangs."""
        self._arrivals.join()
        deadline = time.monotonic() + REQUEST_TIMEOUT_S + 30
        for client in self.clients:
            client.join(max(deadline - time.monotonic(), 0.0))
        return [f"{client.name} hangs" for client in self.clients if client.is_alive()]

    def _arrive(self) -> None:
        at = time.monotonic()
        while (at := at + self._rng.expovariate(self._rate)) < self._end_at:
            time.sleep(max(at - time.monotonic(), 0.0))
            self.num_arrivals += 1
            self._due.put(at)
        for _ in self.clients:
            self._due.put(None)


def closed_loop(
    traffic: Traffic, tally: Tally, latencies: Latencies, num_clients: int, seconds: float, seed: int
) -> list[MixedClient]:
    """Clients that have started, of which each asks its next when it has its answer, for so many seconds."""
    end_at = time.monotonic() + seconds

    def arrival() -> float | None:
        now = time.monotonic()
        return now if now < end_at else None

    clients = [MixedClient(traffic, tally, latencies, seed + n, arrival) for n in range(num_clients)]
    for client in clients:
        client.start()
    return clients


def goodput(traffic: Traffic, seconds: float, seed: int) -> tuple[float, dict[int, float]]:
    """Requests a second that came to their right end within SLO_S: the best, and by the number of clients, of which
    each asks its next when it has its answer. Each number is tried for `seconds`. Raises `AssertionError` for a wrong
    answer."""
    found: dict[int, float] = {}
    for num_clients in (2, 4, 8, 16):
        tally, latencies = Tally(), Latencies()
        begin = time.monotonic()
        clients = closed_loop(traffic, tally, latencies, num_clients, seconds, seed)
        for client in clients:
            client.join(REQUEST_TIMEOUT_S + seconds)
        took = time.monotonic() - begin
        assert not tally.problems, tally.problems
        num_good = sum(waited <= SLO_S for _, waited in latencies.found)
        num_good += tally.outcomes["deadline"] + tally.outcomes["in time"]  # as they were meant to end
        found[num_clients] = round(num_good / took, 2)
    return max(found.values()), found
