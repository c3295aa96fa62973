"""A model without weights, whose next token depends on every byte of KV that it may attend to.

Its K is the token id and its V the position, so a block that is missing, stale, shared wrongly or overwritten changes
the answer. `reference` says what the answer has to be.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import pytest
import torch

from common.batch_time import BatchTime
from common.config import EngineSettings
from common.sampling import SamplingParams
from common.types import KVCacheSpec, SampledToken
from engine import messages as m
from engine.blocks.host_tier import BlockCopy
from engine.core import EngineCore
from engine.device import Device, DeviceInfo, KVPlane, Ticket, do_nothing
from engine.local.host_cache import copy_blocks
from engine.local.host_memory import num_host_blocks
from engine.request import Request
from engine.speculation.speculation import Drafter
from engine.step import StepInput, StepOutput, StepRow
from kv_store.base import ConnectorConfig, KVConnector
from kv_store.memory import MemoryConnector

VOCAB_SIZE = 97
BLOCK_SIZE = 4
PATIENCE_S = 60.0  # until a test gives up; nothing is expected to take that long
SPEC = KVCacheSpec(model_id="fake", num_layers=1, num_kv_heads=1, head_dim=1, block_size=BLOCK_SIZE, dtype="float32")


def next_token(token_ids: Sequence[int]) -> int:
    return int.from_bytes(hashlib.blake2b(array("I", token_ids).tobytes(), digest_size=4).digest(), "little") % (
        VOCAB_SIZE - 1
    )


def reference(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The `num_tokens` tokens that follow `prompt`."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class FakeDevice(Device):
    """Values that a subclass changes are read when the device is made."""

    vocab_size = VOCAB_SIZE
    eos_token_id = VOCAB_SIZE - 1  # never drawn

    def __init__(self, num_blocks: int = 64, max_model_len: int = 200, num_host_blocks: int = 0) -> None:
        self.info = DeviceInfo(
            spec=SPEC,
            num_blocks=num_blocks,
            num_host_blocks=num_host_blocks,
            max_model_len=min(max_model_len, num_blocks * BLOCK_SIZE),
            vocab_size=self.vocab_size,
            hidden_size=2,
            eos_token_ids=(self.eos_token_id,),
            dtype_reason="it is a fake",
            device="cpu",
            device_reason="it is a fake",
            free_rows=4.0,
        )
        self.kv_cache = torch.full((num_blocks, *SPEC.block_shape), -1.0)
        self.host_cache = torch.full((num_host_blocks, *SPEC.block_shape), -1.0)
        self.num_tokens_per_step: list[int] = []
        self.fail_next = False
        self.requests: Callable[[], Iterable[Request]] = list  # those that are not released
        self.checks_kv = True  # fails the test if one of them reads other KV than its own
        self._begun: dict[int, StepInput] = {}
        self._drawn: tuple[int, list[SampledToken | None]] = 0, []  # by the step computed last

    def begin(self, step: StepInput) -> Ticket:
        if step.copies:
            self.copy(step.copies)
        self._begun[step.number] = step
        return Ticket(step.number)

    def end(self, ticket: Ticket, meanwhile: Callable[[], None] = do_nothing) -> StepOutput:
        return self.compute_step(self._begun.pop(ticket.number), meanwhile)

    def compute_step(self, step: StepInput, meanwhile: Callable[[], None]) -> StepOutput:
        rows = [self._resolved(row) for row in step.rows]
        if self.fail_next or None in rows:
            self.fail_next = False
            self._drawn = step.number, [None] * len(rows)
            return StepOutput(tokens=[None] * len(rows), failures=dict.fromkeys(range(len(rows)), "it is on fire"))
        known = [row for row in rows if row is not None]
        self.num_tokens_per_step.append(sum(len(row.token_ids) for row in known))
        for row in known:
            self._write(row)
            meanwhile()  # the hardest moment: half of the batch is written
        output = self.results(known)
        self._drawn = step.number, output.tokens
        return output

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        copy_blocks(copies, self.kv_cache, self.host_cache)

    def planes(self) -> list[KVPlane]:
        return [KVPlane(spec=SPEC, cache=self.kv_cache)]

    def results(self, rows: Sequence[StepRow]) -> StepOutput:
        pooled = {}
        for index, row in enumerate(rows):
            if row.num_pooled:
                token_ids = row.token_ids[-row.num_pooled :]
                pooled[index] = [float(sum(token_ids)), float(len(token_ids))]
        scores = {
            index: [SampledToken(token_id, -1.0) for token_id in row.score.token_ids]
            for index, row in enumerate(rows)
            if row.score is not None
        }
        return StepOutput(tokens=[self._draw(row) for row in rows], scores=scores, pooled=pooled)

    def _resolved(self, row: StepRow) -> StepRow | None:
        """The row with its first token; None if the step before has not drawn it."""
        if row.first is None:
            return row
        number, drawn = self._drawn
        token = drawn[row.first.row] if row.first.step == number else None
        return None if token is None else replace(row, token_ids=[token.token_id, *row.token_ids[1:]], first=None)

    def _slot(self, row: StepRow, position: int) -> torch.Tensor:
        block = self.kv_cache[row.block_ids[position // BLOCK_SIZE]]
        return block[0, :, 0, position % BLOCK_SIZE, 0]

    def _write(self, row: StepRow) -> None:
        for position, token in enumerate(row.token_ids, row.num_computed_tokens):
            self._slot(row, position).copy_(torch.tensor([float(token), float(position)]))

    def _draw(self, row: StepRow) -> SampledToken | None:
        if row.draw is None:
            return None
        num_tokens = row.num_computed_tokens + len(row.token_ids)
        seen = [self._slot(row, position).tolist() for position in range(num_tokens)]
        if [position for _, position in seen] != list(range(num_tokens)):
            if self.checks_kv and any(one.block_ids is row.block_ids for one in self.requests()):
                pytest.fail(f"a row of {num_tokens} tokens reads other KV than its own: {seen}")
            # Its request was released in mid-step: the blocks may be another's by now, and nobody reads the token.
            return SampledToken(self.eos_token_id)
        return SampledToken(next_token([int(token) for token, _ in seen]))


class TimedDevice(FakeDevice):
    """Computes nothing, and says of each step how long it took. `now` goes on by that."""

    def __init__(self, seconds_of: Callable[[StepInput], float], num_blocks: int = 64) -> None:
        super().__init__(num_blocks, max_model_len=num_blocks * BLOCK_SIZE)
        self.now = 0.0
        self._seconds_of = seconds_of

    def end(self, ticket: Ticket, meanwhile: Callable[[], None] = do_nothing) -> StepOutput:
        step = self._begun.pop(ticket.number)
        elapsed_s = self._seconds_of(step)
        self.now += elapsed_s
        if self.fail_next:
            return StepOutput(tokens=[None] * len(step.rows), failures={0: "it is on fire"})
        tokens = [None if row.draw is None else SampledToken(1) for row in step.rows]
        return StepOutput(tokens=tokens, elapsed_s=elapsed_s)

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Nothing."""


def still() -> float:
    """A clock for `make_core` that stands still, for what must not end by time."""
    return 0.0


def make_core(
    *,
    num_blocks: int = 64,
    connector: KVConnector | None = None,
    store: KVConnector | None = None,
    epoch: str = "e1",
    drafter: Drafter | None = None,
    device_type: type[FakeDevice] | None = None,
    clock: Callable[[], float] | None = None,
    batch_time: BatchTime | None = None,
    **settings: object,
) -> tuple[EngineCore, FakeDevice]:
    """An engine on the fake model; `settings` as in `EngineSettings`. Its clock goes on by a second each time it is
    read, unless it has another one."""
    checked = EngineSettings(block_size=BLOCK_SIZE, **settings)
    device = (device_type or FakeDevice)(num_blocks, num_host_blocks=num_host_blocks(checked, SPEC.block_bytes))
    connector = connector or MemoryConnector(ConnectorConfig(epoch=epoch, worker_id=f"test-{epoch}"))
    core = EngineCore(
        checked,
        device,
        connector,
        clock=clock or map(float, itertools.count()).__next__,
        wake=lambda: None,
        store=store,
        drafter=drafter,
        batch_time=lambda: batch_time,
    )
    device.requests = core.scheduler.requests.values
    return core, device


def add(
    core: EngineCore,
    request_id: str,
    prompt: Sequence[int],
    max_tokens: int = 8,
    *,
    waits_for_lookup: bool = True,
    **fields: object,
) -> None:
    """Returns when the request is admitted; earlier if the test does not wait for the store's answer."""
    params = fields.pop("params", None) or SamplingParams(temperature=0.0, max_tokens=max_tokens)
    core.handle(
        m.AddRequest(request_id=request_id, prompt_token_ids=list(prompt), sampling_params=params, **fields)  # type: ignore[arg-type]
    )
    give_up = time.monotonic() + PATIENCE_S
    lookups = core.remote_kv.lookups
    while waits_for_lookup and any(lookup.num_blocks is None for _, lookup in lookups.waiting.values()):
        assert time.monotonic() < give_up, "the store does not answer"
        time.sleep(0.0005)
    core._queue_ready()


def tokens_of(events: Sequence[m.Event]) -> dict[str, list[int]]:
    """Tokens by request, from events."""
    answers: dict[str, list[int]] = {}
    for event in events:
        if isinstance(event, m.TokensGenerated):
            answers.setdefault(event.request_id, []).extend(token.token_id for token in event.tokens)
    return answers


def run(core: EngineCore, max_steps: int = 2000) -> list[m.Event]:
    """Steps until there is nothing to compute; checks integrity after each step; all events."""
    events: list[m.Event] = []
    for _ in range(max_steps):
        did_work = core.step()
        problems = core.scheduler.check_integrity()
        assert not problems, problems
        events += core.take_events()
        if not did_work:
            return events
    raise AssertionError(f"not done after {max_steps} steps")


def assert_idle(core: EngineCore) -> None:
    """Every block is empty or cached, and no request is left."""
    assert core.scheduler.check_integrity() == []
    assert not core.scheduler.requests
    assert core.blocks.num_available_blocks == core.blocks.num_blocks
