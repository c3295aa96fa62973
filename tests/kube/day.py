"""The traffic of a made-up day: how many clients ask for what follows its hours, and every answer is compared.

What an hour's clients need of the fleet does not depend on how fast the machine is:

- clients with prompts send one a second, so they are prompt tokens a second;
- clients with answers read one after another, so they are requests at decode workers.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from baton.client.sync_client import Client
from tests.kube.load import at_once

EVERY_S = 1.0  # a client with prompts sends one so often
IDLE_S = 0.1  # between two looks whether there is something to do
PATIENCE_S = 120.0


class Kind(NamedTuple):
    """What one sort of clients asks for."""

    num_prompt_tokens: int
    num_output_tokens: int


PROMPTS = Kind(200, 1)
ANSWERS = Kind(17, 150)  # more than a KV block, so a prefill worker computes these prompts, too


@dataclass(slots=True, frozen=True, kw_only=True)
class Hour:
    """How many clients of each kind there are."""

    prompts: int
    answers: int


@dataclass
class Day:
    """Counts what clients asked and got. They retry nothing."""

    port: int  # of the router, gRPC
    hour: Hour = field(default_factory=lambda: Hour(prompts=0, answers=0))
    num_asked: int = 0
    num_right: int = 0
    expected: dict[Kind, tuple[int, ...]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def ask(self, client: Client, kind: Kind) -> None:
        """Raises what the client raises, and AssertionError if the answer is not the first one's."""
        with self._lock:
            self.num_asked += 1
        done = client.generate(
            [1000 + 7 * i for i in range(kind.num_prompt_tokens)],
            max_tokens=kind.num_output_tokens,
            ignore_eos=True,
            temperature=0.0,
            cache_salt=uuid.uuid4().hex,  # nothing is cached: each prompt has to be computed
        ).result()
        with self._lock:
            assert done.token_ids == self.expected.setdefault(kind, done.token_ids), done.report
            assert len(done.token_ids) == kind.num_output_tokens, done.report
            self.num_right += 1

    def send_prompts(self, number: int, late_s: float, stop: threading.Event) -> None:
        """One each second, `late_s` after the full one, at hours with more than `number` such clients."""
        with Client(f"127.0.0.1:{self.port}", timeout=PATIENCE_S) as client:
            while not stop.wait(EVERY_S - (time.monotonic() - late_s) % EVERY_S):
                if number < self.hour.prompts:
                    self.ask(client, PROMPTS)

    def read_answers(self, number: int, stop: threading.Event) -> None:
        """One after another, at hours with more than `number` such clients."""
        with Client(f"127.0.0.1:{self.port}", timeout=PATIENCE_S) as client:
            while not stop.is_set():
                if number < self.hour.answers:
                    self.ask(client, ANSWERS)
                else:
                    stop.wait(IDLE_S)

    def more_answers(self, number: int) -> None:
        """Waits until `number` more requests have been answered. Raises AssertionError if they are not."""
        goal, deadline = self.num_right + number, time.monotonic() + PATIENCE_S
        while self.num_right < goal:
            assert time.monotonic() < deadline, f"{self.num_right} of {self.num_asked} requests were answered"
            time.sleep(IDLE_S)


@contextmanager
def day(port: int, *, most: Hour) -> Iterator[Day]:
    """A day with no more clients than `most` at any hour. It begins with an answer of each kind, which the others have
    to equal, and without clients. Leaving waits for the answers under way.

    Raises ExceptionGroup if a request failed, or was answered otherwise.
    """
    found = Day(port)
    with Client(f"127.0.0.1:{port}", timeout=PATIENCE_S) as client:
        for kind in (PROMPTS, ANSWERS):
            found.ask(client, kind)

    def ask(number: int, stop: threading.Event) -> None:
        if number < most.prompts:
            found.send_prompts(number, EVERY_S * number / most.prompts, stop)
        else:
            found.read_answers(number - most.prompts, stop)

    with at_once(most.prompts + most.answers, ask):
        yield found
