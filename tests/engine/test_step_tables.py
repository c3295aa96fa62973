"""Tables that requests keep from step to step are those that would be built anew, and cost the same at any length."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import FrameType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from common.block_hash import root_hash
from common.config import EngineSettings
from common.sampling import SamplingParams
from common.types import SampledToken
from engine.attention.flashinfer import FlashInferBackend
from engine.attention.registry import attention_backend
from engine.attention.step_tables import StepTables
from engine.blocks.block_manager import BlockManager
from engine.core import EngineCore
from engine.device import Ticket, do_nothing
from engine.request import Request
from engine.step import StepInput, StepOutput, StepRow
from kv_store.base import ConnectorConfig
from kv_store.memory import MemoryConnector
from tests.engine.fake_flashinfer import fake_flashinfer
from tests.engine.kernels.variants import VARIANTS, kernels
from tests.engine.test_model_attention import NUM_BLOCKS, SHAPE, SPEC, make_backend
from tests.examples import examples
from tests.support.fake_device import BLOCK_SIZE, FakeDevice, add, assert_idle, make_core, reference, run, tokens_of

WINDOWS = (0, 1, 3, 4, 9, 40)


def check(sequences: Sequence[StepRow], tables: Sequence[Sequence[int]], size: int) -> None:
    """`tables` are what the sequences' should be. Everything is compared with what loops over lists give."""
    made = StepTables(sequences, size)
    slots, rows = [], list(range(len(sequences)))[::-1]
    for sequence, table in zip(sequences, tables, strict=True):
        start = sequence.num_computed_tokens
        for position in range(start, start + len(sequence.token_ids)):
            slots.append((table[position // size], position % size))
    blocks, offsets = made.slots()
    assert list(zip(blocks.tolist(), offsets.tolist(), strict=True)) == slots
    for window in WINDOWS:
        seen = []
        for sequence, table in zip(sequences, tables, strict=True):
            start, end = sequence.num_computed_tokens, sequence.num_computed_tokens + len(sequence.token_ids)
            first = max(0, start + 1 - window) // size if window else 0
            seen.append(list(table[first : -(-end // size)]))
        flat, starts = made.flat(np.array(rows, np.int32), window)
        assert (flat.dtype, starts.dtype) == (torch.int32, torch.int32)
        assert starts.tolist() == [0, *np.cumsum([len(seen[row]) for row in rows]).tolist()]
        assert flat.tolist() == [block for row in rows for block in seen[row]]
        width = max(map(len, seen))
        assert made.padded(0, len(seen), window).tolist() == [each + each[-1:] * (width - len(each)) for each in seen]
        assert made.padded(len(seen) - 1, len(seen), window).tolist() == seen[-1:]


class KeptTables(RuleBasedStateMachine):
    """Whatever the block manager does to requests, each table is what its rule says of the table before."""

    live = Bundle("live")

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockManager(24, 4, root_hash("tables"), num_host_blocks=12)
        self.requests: dict[str, Request] = {}
        self.expected: dict[str, list[int]] = {}
        self.number = 0

    def grown(self, request: Request) -> None:
        """The table is the one before, and has as many blocks behind it as the tokens need."""
        before, now = self.expected[request.request_id], list(request.block_ids)
        assert now[: len(before)] == before
        self.expected[request.request_id] = now

    def compute(self, request: Request) -> None:
        request.num_computed_tokens = request.num_tokens
        self.blocks.name_computed(request)

    @rule(target=live, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=30))
    def allocate(self, tokens: list[int]) -> str:
        self.number += 1
        name = str(self.number)
        params = SamplingParams()
        request = Request(
            request_id=name, token_ids=tokens, num_prompt_tokens=len(tokens), sampling_params=params, arrival_time=0.0
        )
        found = self.blocks.find_prefix(request)
        shared = [self.blocks.cache.find(one) for one in request.block_hashes[:found]]
        self.requests[name], self.expected[name] = request, []
        if self.blocks.allocate(request, len(tokens), found):
            assert list(request.block_ids)[:found] == shared
            self.grown(request)
            self.compute(request)
        return name

    @rule(name=live, num_more=st.integers(1, 9), num_wrong=st.integers(0, 9))
    def append(self, name: str, num_more: int, num_wrong: int) -> None:
        """Some of the tokens are drafts that turn out to be wrong."""
        request = self.requests[name]
        if request.block_ids and self.blocks.append(request, request.num_tokens + num_more + num_wrong):
            self.grown(request)
            request.token_ids += [2] * num_more
            self.blocks.shrink(request, request.num_tokens)
            self.expected[name] = self.expected[name][: -(-request.num_tokens // 4)]
            self.compute(request)

    @rule(name=live, window=st.integers(1, 20))
    def free_unseen(self, name: str, window: int) -> None:
        request, table = self.requests[name], self.expected[name]
        if table:
            before = request.num_unseen_blocks
            self.blocks.free_unseen(request, request.num_computed_tokens + 1 - window)
            if (stop := request.num_unseen_blocks) > before:
                self.expected[name] = [table[stop]] * stop + table[stop:]

    @rule(name=live, other=live)
    def adopt(self, name: str, other: str) -> None:
        """A block of another request comes in the place of its own."""
        request, table, theirs = self.requests[name], self.expected[name], self.expected[other]
        if name != other and table and theirs and not request.num_unseen_blocks:
            self.blocks.take_over(request, 0, theirs[0])
            self.expected[name] = [theirs[0], *table[1:]]

    @rule(name=live)
    def swap(self, name: str) -> None:
        request, num_unseen = self.requests[name], self.requests[name].num_unseen_blocks
        if request.host_block_ids:
            num_blocks = num_unseen + len(request.host_block_ids)
            if self.blocks.swap_in(request):
                table = list(request.block_ids)
                assert len(table) == num_blocks
                assert table[:num_unseen] == table[num_unseen : num_unseen + 1] * num_unseen
                self.expected[name] = table
        elif request.block_ids and self.blocks.swap_out(request):
            self.expected[name] = []
        self.blocks.take_copies()

    @rule(name=live)
    def preempt(self, name: str) -> None:
        request = self.requests[name]
        if request.block_ids:
            self.blocks.free(request)
            self.expected[name] = []

    @rule(name=consumes(live))
    def free(self, name: str) -> None:
        request = self.requests.pop(name)
        under_way, table = request.block_ids, self.expected.pop(name)
        self.blocks.free(request)
        assert list(under_way) == table, "a step that reads the table goes on reading the same"
        assert not request.block_ids

    @invariant()
    def tables_are_as_built_anew(self) -> None:
        assert self.blocks.check_integrity(self.requests.values()) == []
        sequences = []
        for number, request in enumerate(self.requests.values()):
            assert isinstance(request.block_ids, array)
            assert list(request.block_ids) == self.expected[request.request_id]
            if request.block_ids:
                num_new = 1 if number % 2 else max(1, request.num_tokens // 2)
                sequences.append(
                    StepRow(
                        token_ids=request.token_ids[-num_new:],
                        num_computed_tokens=request.num_tokens - num_new,
                        block_ids=request.block_ids,
                    )
                )
        if sequences:
            check(sequences, [table for table in self.expected.values() if table], 4)


TestKeptTables = KeptTables.TestCase
TestKeptTables.settings = settings(max_examples=examples(25), stateful_step_count=30, deadline=None)


class CheckingDevice(FakeDevice):
    """Compares each step's tables; the fake's answers tell whether the blocks are the right ones."""

    def begin(self, step: StepInput) -> Ticket:
        check(step.rows, [list(row.block_ids) for row in step.rows], BLOCK_SIZE)
        return super().begin(step)


@settings(max_examples=examples(15), deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=25), min_size=1, max_size=6),
    num_blocks=st.integers(12, 30),
    mode=st.sampled_from(["recompute", "swap"]),
    speculation=st.sampled_from(["none", "ngram"]),
)
def test_in_an_engine_under_pressure(prompts: list[list[int]], num_blocks: int, mode: str, speculation: str) -> None:
    core, runner = make_core(
        num_blocks=num_blocks, preemption_mode=mode, swap_space_gb=1e-6, speculation=speculation, chunk_size=7
    )
    runner.__class__ = CheckingDevice
    for number, prompt in enumerate(prompts):
        add(core, str(number), prompt, max_tokens=12)
    assert tokens_of(run(core)) == {str(number): reference(prompt, 12) for number, prompt in enumerate(prompts)}
    assert_idle(core)


class Unlooped(array):  # type: ignore[type-arg] # not subscriptable before Python 3.12
    """A table that may be copied as memory only."""

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("a loop over the blocks")

    def __getitem__(self, index: object) -> int:
        raise AssertionError("a look at single blocks")


@pytest.mark.parametrize("name", ["torch", "flashinfer", *(f"native {variant}" for variant in VARIANTS)])
def test_backends_copy_tables_as_memory(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    if name == "flashinfer":
        fake_flashinfer(monkeypatch)
    sequences = [
        StepRow(token_ids=[0] * num_new, num_computed_tokens=before, block_ids=Unlooped("i", range(9)))
        for before, num_new in ((30, 1), (7, 1), (0, 12), (9, 20))
    ]
    if name.startswith("native"):
        cache = torch.zeros(NUM_BLOCKS, *SPEC.block_shape)
        backend = attention_backend(cache, SPEC, SHAPE, "native", kernels(name.removeprefix("native ")))
    elif name == "flashinfer":
        backend = FlashInferBackend(torch.zeros(NUM_BLOCKS, *SPEC.block_shape), SPEC, SHAPE)
    else:
        backend = make_backend(name)
    step = backend.prepare(sequences)
    qkv = torch.randn(34, 10, SPEC.head_dim)
    step.forward(0, qkv[:, :6], qkv[:, 6:].view(34, 2, 2, SPEC.head_dim))


class Blind(FakeDevice):
    """Works out where the tokens go, and computes nothing."""

    def end(self, ticket: Ticket, meanwhile: Callable[[], None] = do_nothing) -> StepOutput:
        rows = self._begun.pop(ticket.number).rows
        tables = StepTables(rows, BLOCK_SIZE)
        tables.slots()
        tables.flat(np.arange(len(rows), dtype=np.int32), 0)
        tables.padded(0, len(rows), 9)
        return StepOutput(tokens=[SampledToken(1) if row.draw else None for row in rows])


@pytest.mark.parametrize("window", [0, 9])
def test_a_step_executes_as_much_python_after_a_long_context(window: int) -> None:
    short, long = num_instructions(64, window), num_instructions(1600, window)
    assert short > 10_000
    assert long == pytest.approx(short, rel=0.01)  # which blocks come from where differs by a handful


def num_instructions(context: int, window: int) -> int:
    """Of Python's, in steps of 8 requests from one block to the next after so many tokens."""
    runner = Blind(num_blocks=8 * 420, max_model_len=1680)
    runner.info = replace(runner.info, window=window)
    connector = MemoryConnector(ConnectorConfig(epoch="blind", worker_id="blind"))
    core = EngineCore(EngineSettings(block_size=BLOCK_SIZE), runner, connector, lambda: 0.0, lambda: None)
    for number in range(8):
        add(core, str(number), list(range(number, number + context)), max_tokens=40)
    while any(request.num_output_tokens < 5 for request in core.scheduler.requests.values()):
        core.step()
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> object:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    former = sys.gettrace()
    sys.settrace(trace)  # type: ignore[arg-type]
    try:
        for _ in range(2 * BLOCK_SIZE):
            core.step()
    finally:
        sys.settrace(former)
    return count
