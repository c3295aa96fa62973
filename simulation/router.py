"""What a router decides by: the real policy, prefix index, worker records and times of first tokens, fed by simulated
workers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

import grpc

from common.batch_time import BatchTime
from common.targets import LatencyTargets
from common.types import WorkerLoad, WorkerRole, WorkerState, request_tag
from protos.baton.v1 import worker_pb2
from router.fleet.endpoint import RoleTaken
from router.fleet.fleet import Fleet
from router.fleet.prefix_index import PrefixIndex
from router.fleet.worker import Sent, WorkerRecord
from router.policy.base import FirstTokenTarget, Policy, RoutingDecision, RoutingRequest
from router.running.first_token_times import FirstTokenTimes
from router.running.routes import load_of

FINGERPRINT = "simulation"
SWEEP_BLOCKS = 2**16


class SimulatedRouter:
    def __init__(self, policy: Policy, block_size: int) -> None:
        self._policy = policy
        self._block_size = block_size
        self.first_tokens = FirstTokenTimes()
        self._index = PrefixIndex()
        self._records: dict[str, WorkerRecord] = {}
        self._fleet: Fleet | None = None  # None: workers have come or gone
        self._changed: set[str] = set()  # addresses of workers that `_fleet` is to be told of

    def add(
        self,
        address: str,
        role: WorkerRole,
        time: BatchTime | None,
        max_model_len: int,
        takes: WorkerRole | None = None,
    ) -> None:
        """`time`: None if the worker says nothing of how long its steps take. `takes`: of which role it takes work, if
        that may change."""
        info = worker_pb2.WorkerInfo(
            worker_id=address,
            fingerprint=FINGERPRINT,
            block_size=self._block_size,
            max_model_len=max_model_len,
            splits_prompts=True,
        )
        no_channel = cast("grpc.aio.Channel", None)  # nothing is sent
        self._records[address] = WorkerRecord(
            address, role, no_channel, 0, info=info, batch_time=time, state=WorkerState.READY
        )
        if takes is not None:
            self._records[address].taken = RoleTaken(takes)
        self._index.reset(address)
        self._fleet = None

    def set_role(self, address: str, takes: WorkerRole) -> None:
        """The worker takes work of another role from now on."""
        self._records[address].taken = RoleTaken(takes)
        self._changed.add(address)

    def drain(self, address: str) -> None:
        """The worker gets no further request."""
        self._records[address].state = WorkerState.DRAINING
        self._changed.add(address)

    def remove(self, address: str) -> None:
        del self._records[address]
        self._changed.discard(address)
        self._index.forget(address)
        while self._index.sweep(SWEEP_BLOCKS):
            pass
        self._fleet = None

    def report_load(self, address: str, load: WorkerLoad, now: float, counted: Iterable[int] = ()) -> None:
        self._records[address].take_load(load, now, counted)
        self._changed.add(address)

    def report_blocks(self, address: str, stored: bytes, removed: bytes) -> None:
        if removed:
            self._index.remove(address, removed)
        if stored:
            self._index.store(address, stored)

    def pick(
        self,
        now: float,
        *,
        num_prompt_tokens: int,
        num_tokens: int,
        block_names: Sequence[bytes],
        session: str,
        targets: LatencyTargets | None = None,
        age_s: float = 0.0,
        refused: Iterable[tuple[str, str]] = (),
    ) -> RoutingDecision:
        """Decides where a request goes. `block_names` leave out the prompt's last token. `refused`: incarnations of
        workers that did. Raises `UnavailableError` if no decode worker can take it."""
        tried = frozenset(refused)
        wanted = RoutingRequest(
            num_prompt_tokens=num_prompt_tokens,
            num_tokens=num_tokens,
            fingerprint=FINGERPRINT,
            block_names=block_names,
            cached_blocks=self._index.match(block_names, now),
            num_told_blocks=lambda address: self._index.num_told(address, block_names),
            session=session,
            tried=tried,
            refused=tried,
            first_token=self._first_token(targets, age_s),
            handoff_token_s=self.first_tokens.handoff_token_s(now),
        )
        return self._policy.pick(wanted, self._told())

    def _first_token(self, targets: LatencyTargets | None, age_s: float) -> FirstTokenTarget | None:
        if targets is None or targets.ttft_ms is None:
            return None
        token_s = None if targets.tpot_ms is None else targets.tpot_ms / 1000
        return self.first_tokens.target(targets.ttft_ms / 1000 - age_s, token_s)

    def send(
        self,
        key: str,
        now: float,
        decision: RoutingDecision,
        block_names: Sequence[bytes],
        num_prompt_tokens: int,
    ) -> None:
        """Counts a request where `decision` sends it, until `ended`."""
        for address, num_missing in load_of(decision).items():
            self._index.expect(address, block_names, now)
            sent = Sent(now, num_missing, request_tag(key), decision.slack_s, num_prompt_tokens)
            self._records[address].send(key, sent)
            self._changed.add(address)

    def ended(self, key: object, decision: RoutingDecision) -> None:
        for address in load_of(decision):
            if record := self._records.get(address):
                record.reported(key)
                record.running.discard(key)
                self._changed.add(address)

    def _told(self) -> Fleet:
        """The fleet as it is known now."""
        if self._fleet is None:
            self._fleet = Fleet(record.endpoint() for record in self._records.values())
        else:
            for address in self._changed:
                self._fleet.update(self._records[address].endpoint())
        self._changed.clear()
        return self._fleet
