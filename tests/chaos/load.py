"""Clients that ask without a pause, and a tally of what became of their requests."""

from __future__ import annotations

import random
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from baton.client.call_errors import CancelledError
from baton.client.sync_client import Client
from common.errors import BatonError, DeadlineError
from common.targets import LatencyTargets
from tests.chaos.cases import Case

REQUEST_TIMEOUT_S = 90.0


@dataclass(slots=True)
class Tally:
    """What became of the requests; shared by the client threads."""

    outcomes: Counter[str] = field(default_factory=Counter)
    extras: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, outcome: str, problem: str = "", extras: dict[str, int] | None = None) -> str:
        with self.lock:
            self.outcomes[outcome] += 1
            self.extras.update(extras or {})
            if problem:
                self.problems.append(problem)
                print(f"{outcome}: {problem}", file=sys.stderr, flush=True)
        return outcome


class Cancellable(Protocol):
    """A request that is running."""

    def cancel(self) -> None: ...


class ClientThread(threading.Thread):
    """Asks one request after the other, some with too little time. `cancel` ends the one that is running."""

    def __init__(
        self,
        router: str,
        cases: list[Case],
        wanted: list[tuple[int, ...]],
        tally: Tally,
        seed: int,
        end_at: float,
        targets: Sequence[LatencyTargets | None] = (),
    ) -> None:
        """`targets`: each request has one of these; none has any if it is empty."""
        super().__init__(name=f"client-{seed}", daemon=True)
        self._router, self._cases, self._wanted, self._tally = router, cases, wanted, tally
        self._rng = random.Random(seed)
        self._targets = targets
        self._end_at = end_at
        self._answer: Cancellable | None = None
        self._was_cancelled = False

    def run(self) -> None:
        try:
            with Client(self._router, timeout=REQUEST_TIMEOUT_S) as patient:
                while time.monotonic() < self._end_at:
                    self._one(patient)
        except Exception:
            self._tally.add("client error", traceback.format_exc())

    def cancel(self) -> bool:
        """From another thread. False if nothing is running."""
        answer = self._answer
        if answer is None:
            return False
        self._was_cancelled = True
        answer.cancel()
        return True

    def _one(self, patient: Client) -> str:
        """Asks once. Returns the outcome that it has added to the tally."""
        index = self._rng.randrange(len(self._cases))
        salt = f"{self._rng.randrange(2**40)}" if self._rng.random() < 0.7 else "warm"
        if self._rng.random() < 0.1:
            return self._short(index, salt)
        return self._whole(patient, index, salt)

    def _whole(self, client: Client, index: int, salt: str) -> str:
        case = self._cases[index]
        self._was_cancelled = False
        answer = client.generate(
            case.prompt,
            temperature=case.temperature,
            seed=case.seed,
            max_tokens=case.max_tokens,
            ignore_eos=True,
            cache_salt=salt,
            slo=self._rng.choice(self._targets) if self._targets else None,
        )
        self._answer = answer
        try:
            result = answer.result()
        except BatonError as error:
            if self._was_cancelled and isinstance(error, CancelledError):
                return self._tally.add("cancelled")
            return self._tally.add("lost", f"case {index} after {len(answer.text)} characters: {error}")
        finally:
            self._answer = None
        report = result.report
        extras = {
            "migrations": report.num_migrations,
            "handovers": report.num_handovers,
            "retries": report.num_retries,
            "hedges": report.num_hedges,
            "hedges_won": report.num_hedges_won,
            "fallbacks": int(bool(report.fallback_reason)),
            "blocks_moved": report.num_blocks_moved,
            "in_target": int(report.slo is not None and report.slo.ttft_met is True),
        }
        if result.token_ids == self._wanted[index]:
            return self._tally.add("equal", extras=extras)
        pairs = zip(result.token_ids, self._wanted[index], strict=False)
        at = next((number for number, (got, want) in enumerate(pairs) if got != want), "the end")
        return self._tally.add("wrong", f"case {index} differs at {at}: {report}", extras)

    def _short(self, index: int, salt: str) -> str:
        with Client(self._router, timeout=0.02 + self._rng.random() * 0.5) as hasty:
            try:
                hasty.generate(self._cases[index].prompt, max_tokens=300, ignore_eos=True, cache_salt=salt).result()
                return self._tally.add("in time")
            except DeadlineError:
                return self._tally.add("deadline")
            except BatonError as error:
                return self._tally.add("lost", f"a request with a short deadline: {error}")
