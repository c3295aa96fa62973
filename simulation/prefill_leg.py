"""One request's way to a prefill worker and back, as `decode_service.prefill_leg` goes it.

A prefill worker that refuses the prompt is followed by the next in the list. One that is late is not given up: the next
one is asked beside it, once. The first to give a block or the token goes on, and the other one is released. One request
lends to one worker.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from common.retry_budget import RetryBudget
from engine import messages as m
from simulation.clock import VirtualClock
from simulation.outcome import RequestOutcome
from simulation.worker import SimulatedWorker


@dataclass(slots=True, frozen=True)
class Mail:
    """How messages go."""

    clock: VirtualClock
    message_s: float

    def send(self, worker: SimulatedWorker, command: m.Command) -> None:
        self.clock.at(self.clock.now + self.message_s, lambda: worker.deliver(command))


class PrefillLeg:
    def __init__(
        self,
        key: str,
        outcome: RequestOutcome,
        decode: SimulatedWorker,
        addresses: Sequence[str],
        find: Callable[[str], SimulatedWorker | None],
        mail: Mail,
        *,
        hedge_after_s: float | None,
        hedges: RetryBudget,
        lends: bool,
    ) -> None:
        """`addresses` of prefill workers, in the order in which they are asked; `find` gives the worker, unless it is
        gone. `hedge_after_s`: when the second one is asked, too; None: never. `hedges` of all requests of `decode`."""
        self.elapsed_s: float | None = None  # of the worker that gave the token: from its request to the token
        self._key = key
        self._outcome = outcome
        self._decode = decode
        self._addresses = deque(addresses)  # not asked yet
        self._find = find
        self._mail = mail
        self._hedge_after_s = hedge_after_s
        self._hedges = hedges
        self._lends = lends
        self._asked: list[SimulatedWorker] = []  # and not released: two while a hedge is undecided
        self._asked_at: dict[SimulatedWorker, float] = {}
        self._command: m.AddRequest | None = None  # as the first worker got it, without loans
        self.done_at: float | None = None  # when all that was asked for was computed
        self.num_retries = 0  # workers asked in place of others
        self._giver: SimulatedWorker | None = None
        self._borrower: SimulatedWorker | None = None

    def start(self, command: m.AddRequest) -> None:
        """Asks the first worker. Its `command` lacks what may be lent to it."""
        self._command = command
        self._hedges.request()
        if not self._ask_next():
            self._give_up("no prefill worker is left")
            return
        if self._hedge_after_s is not None and self._addresses:
            clock = self._mail.clock
            clock.at(clock.now + self._hedge_after_s, self._hedge)

    @property
    def is_started(self) -> bool:
        return bool(self._asked_at)

    def lend(self, published: m.BlocksPublished) -> None:
        """Blocks of the decode worker became readable, or never will be."""
        if self._borrower is not None and self._borrower in self._asked:
            self._mail.send(self._borrower, _published(published))

    def take_in(self, worker: SimulatedWorker, event: m.Event) -> None:
        """A prefill worker says something."""
        if worker not in self._asked:
            return
        send, outcome = self._mail.send, self._outcome
        match event:
            case m.LoanNeeded():
                self._lend_to(worker, event)
            case m.BlocksPublished():
                self._go_on_with(worker)
                send(self._decode, _published(event))
            case m.TokensGenerated():
                self._go_on_with(worker)
                now = self._mail.clock.now
                self.elapsed_s = now - self._asked_at[worker]
                self.done_at = now
                outcome.num_cached_tokens = min(event.num_cached_tokens, outcome.num_prompt_tokens)
                if not event.tokens:  # of a part: the decode worker draws the first token
                    return
                send(self._decode, m.RemoteFirstToken(self._key, event.tokens[0]))
                # The decode worker's front passes it on at once.
                outcome.ttft_s = now + 2 * self._mail.message_s - outcome.at
            case m.BlocksFetched():
                outcome.num_bytes_moved += event.num_bytes
            case m.RequestFailed():
                self._asked.remove(worker)
                if self._asked:
                    return
                if self.done_at is None and self._ask_next():
                    self.num_retries += 1
                    outcome.num_retries += 1
                else:
                    self._give_up(f"{event.grpc_code}: {event.reason}")

    def release(self) -> None:
        """The decode worker needs nothing more."""
        for worker in self._asked:
            self._let_go(worker)
        self._asked.clear()

    # ------------------------------------------------------------------------------------------ internals

    def _give_up(self, reason: str) -> None:
        self._mail.send(self._decode, m.RemotePrefillFailed(self._key, reason))

    def _ask_next(self) -> bool:
        """Asks the next worker that is there. Returns False if none is."""
        worker = None
        while worker is None and self._addresses:
            worker = self._find(self._addresses.popleft())
        if worker is None or (command := self._command) is None:
            return False
        if self._lends and self._borrower is None:
            command = replace(command, num_lendable_blocks=command.first_block)
        self._asked.append(worker)
        self._asked_at[worker] = self._mail.clock.now + self._mail.message_s
        if len(self._asked) == 1:
            self._outcome.prefill = worker.address
        self._mail.send(worker, command)
        return True

    def _hedge(self) -> None:
        """The first worker is late."""
        if self._giver is None and self._asked and self._hedges.spend(self._mail.clock.now):
            self._outcome.num_hedges += self._ask_next()

    def _go_on_with(self, giver: SimulatedWorker) -> None:
        if self._giver is giver:
            return
        self._giver = giver
        if self._outcome.num_hedges:
            self._outcome.is_hedge_won = giver is not self._asked[0]
            self._outcome.prefill = giver.address
        for worker in self._asked:
            if worker is not giver:
                self._let_go(worker)
        self._asked = [giver]

    def _let_go(self, worker: SimulatedWorker) -> None:
        self._mail.send(worker, m.Release(self._key))
        if self._borrower is worker:
            self._mail.send(self._decode, m.EndLoan(self._key))

    def _lend_to(self, worker: SimulatedWorker, wanted: m.LoanNeeded) -> None:
        if self._borrower is None:
            self._borrower = worker
            self._mail.send(self._decode, m.LendBlocks(self._key, wanted.first, wanted.stop))
        else:
            missing, reason = [*range(wanted.first, wanted.stop)], "another prefill worker has been lent them"
            self._mail.send(worker, m.RemoteBlocksPublished(self._key, [], missing, reason))


def _published(event: m.BlocksPublished) -> m.RemoteBlocksPublished:
    return m.RemoteBlocksPublished(event.request_id, event.blocks, event.failed_indexes, event.failure)
