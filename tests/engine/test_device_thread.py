"""A device on a thread of its own: `begin` returns at once, and the engine's answers stay what they are."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.config import EngineSettings
from common.errors import InternalError
from common.sampling import SamplingParams
from engine.blocks.host_tier import BlockCopy
from engine.core import EngineCore
from engine.device import Device, Ticket, do_nothing
from engine.device_thread import DeviceThread
from engine.local.device import LocalDevice
from engine.sampling.draws import draw
from engine.step import Drawn, StepInput, StepOutput, StepRow
from kv_store.no_store import NoStore
from tests.engine.tiny_models import FAMILIES, VOCAB_SIZE, make_model
from tests.examples import examples
from tests.support.fake_device import (
    BLOCK_SIZE,
    PATIENCE_S,
    FakeDevice,
    add,
    assert_idle,
    reference,
    run,
    still,
    tokens_of,
)

LIKELIEST = draw(SamplingParams(temperature=0.0), 0)


class HeldDevice(FakeDevice):
    """Computes a step only once it may, and notes which thread does."""

    def __init__(self) -> None:
        super().__init__()
        self.has_begun = threading.Event()
        self.may_compute = threading.Event()
        self.threads: list[threading.Thread] = []
        self.begun_copies: list[list[BlockCopy]] = []  # of each step

    def begin(self, step: StepInput) -> Ticket:
        self.begun_copies.append(list(step.copies))
        return super().begin(step)

    def compute_step(self, step: StepInput, meanwhile: Callable[[], None]) -> StepOutput:
        self.has_begun.set()
        assert self.may_compute.wait(PATIENCE_S)
        self.threads.append(threading.current_thread())
        return super().compute_step(step, meanwhile)


@contextmanager
def thread_of(device: Device, is_inline: Callable[[], bool] = lambda: False) -> Iterator[DeviceThread]:
    one = DeviceThread(device, is_inline)
    try:
        yield one
    finally:
        one.close()


def prompt_of(token_ids: Sequence[int], block_ids: Sequence[int]) -> StepRow:
    return StepRow(token_ids=list(token_ids), num_computed_tokens=0, block_ids=block_ids, draw=LIKELIEST)


def test_a_step_begins_while_another_one_is_computed() -> None:
    device = HeldDevice()
    with thread_of(device) as thread:
        blocks = array("i", [3, 5])
        first = thread.begin(StepInput(number=1, rows=[prompt_of([1, 2, 3], blocks)]))
        after = StepRow(
            token_ids=[0], num_computed_tokens=3, block_ids=blocks, draw=LIKELIEST, first=Drawn(step=1, row=0)
        )
        second = thread.begin(StepInput(number=2, rows=[after]))
        blocks[0], blocks[1] = 7, 8  # the engine goes on
        blocks.append(9)
        assert not device.threads
        outputs = [thread.end(first, device.may_compute.set), thread.end(second)]
    drawn = [token.token_id for output in outputs for token in output.tokens if token is not None]
    assert drawn == reference([1, 2, 3], 2)
    assert threading.current_thread() not in device.threads
    assert device.kv_cache[3].ge(0).all()
    assert device.kv_cache[[7, 8, 9]].eq(-1).all()


@pytest.mark.parametrize("overlaps_steps", [True, False])
def test_a_device_that_overlaps_steps_is_given_each_at_once(overlaps_steps: bool) -> None:
    device = HeldDevice()
    device.info = replace(device.info, overlaps_steps=overlaps_steps)
    with thread_of(device) as thread:
        tickets = [thread.begin(StepInput(number=number, rows=[prompt_of([1, 2], [number])])) for number in (1, 2)]
        assert device.has_begun.wait(PATIENCE_S)  # the first step is computed by now, and held
        assert len(device.begun_copies) == (2 if overlaps_steps else 1)
        device.may_compute.set()
        outputs = [thread.end(ticket) for ticket in tickets]
    assert len(device.begun_copies) == 2
    assert all(output.tokens[0] is not None for output in outputs)


def test_a_step_is_computed_with_its_device_as_the_current_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is current is a thread's own: a new thread begins with the first CUDA device."""
    current: set[tuple[str, torch.device]] = set()

    @contextmanager
    def as_current(device: torch.device) -> Iterator[None]:
        entered = threading.current_thread().name, device
        current.add(entered)
        yield
        current.remove(entered)

    computed: list[tuple[str, torch.device]] = []

    class Noting(LocalDevice):
        def _compute(self, rows: Sequence[StepRow], between_layers: Callable[[], None]) -> StepOutput:
            computed.extend(current)
            return super()._compute(rows, between_layers)

    monkeypatch.setattr("engine.local.device.as_current", as_current)
    path = make_model(tmp_path / "llama", FAMILIES["llama"])
    settings = EngineSettings(device="cpu", dtype="float32", num_blocks=8, kernels="torch")
    with thread_of(Noting(path, settings)) as thread:
        thread.end(thread.begin(StepInput(number=1, rows=[prompt_of([1, 2], [0])])))
    assert computed == [("device", torch.device("cpu"))]
    assert not current


def test_messages_pass_until_the_step_has_ended() -> None:
    device = HeldDevice()
    with thread_of(device) as thread:
        calls: list[int] = []

        def meanwhile() -> None:
            calls.append(len(device.threads))
            if len(calls) == 3:
                device.may_compute.set()

        thread.end(thread.begin(StepInput(number=1, rows=[prompt_of([1], [0])])), meanwhile)
    assert len(calls) >= 3


def test_no_messages_pass_if_the_device_hangs() -> None:
    """The engine is silent then, and its front ends it."""
    device, now, calls, calls_until_it_went_on = HeldDevice(), [0.0], 0, 0
    thread = DeviceThread(device, clock=lambda: now[0])

    def go_on() -> None:
        nonlocal calls_until_it_went_on
        calls_until_it_went_on = calls
        device.may_compute.set()

    later = threading.Timer(0.05, go_on)

    def meanwhile() -> None:
        nonlocal calls
        assert device.has_begun.wait(PATIENCE_S)
        calls += 1
        now[0] += 1.0
        if calls == 2:
            later.start()

    thread.end(thread.begin(StepInput(number=1, rows=[prompt_of([1], [0])])), meanwhile)
    later.join()
    thread.close()
    assert calls_until_it_went_on == 2


def test_what_stops_a_step_is_raised_by_its_end() -> None:
    class Broken(FakeDevice):
        def compute_step(self, step: StepInput, meanwhile: Callable[[], None]) -> StepOutput:
            if step.number == 1:
                raise KeyboardInterrupt
            return super().compute_step(step, meanwhile)

    with thread_of(Broken()) as thread:
        tickets = [thread.begin(StepInput(number=number, rows=[prompt_of([1, 2], [0])])) for number in (1, 2)]
        with pytest.raises(KeyboardInterrupt):
            thread.end(tickets[0])
        (token,) = thread.end(tickets[1]).tokens
    assert token is not None
    assert token.token_id == reference([1, 2], 1)[0]


def test_a_step_that_is_not_valid_does_not_begin() -> None:
    with thread_of(FakeDevice()) as thread, pytest.raises(InternalError, match="1 blocks for 5 tokens"):
        thread.begin(StepInput(number=1, rows=[prompt_of([1, 2, 3, 4, 5], [0])]))


def test_a_step_for_a_profiler_is_computed_by_the_engine() -> None:
    device = HeldDevice()
    device.may_compute.set()
    is_profiled = iter((False, True, False))
    with thread_of(device, lambda: next(is_profiled)) as thread:
        for _ in range(3):
            thread.compute([prompt_of([1, 2], [0])])
    assert [one is threading.current_thread() for one in device.threads] == [False, True, False]


def answers(device: Device, given: EngineSettings, prompts: Sequence[list[int]], max_tokens: int) -> list[list[int]]:
    core = EngineCore(given, device, NoStore(), still, lambda: None)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    events = []
    for number, prompt in enumerate(prompts):
        add(core, str(number), prompt, params=params)
        core.end(core.begin(core.prepare()), do_nothing)
        events += core.take_events()
    found = tokens_of([*events, *run(core)])
    assert_idle(core)
    return [found[str(number)] for number in range(len(prompts))]


@settings(max_examples=examples(20))
@given(st.lists(st.lists(st.integers(0, 20), min_size=1, max_size=20), min_size=1, max_size=5))
def test_an_engine_that_runs_ahead_gives_the_same_answers(prompts: list[list[int]]) -> None:
    given = EngineSettings(block_size=BLOCK_SIZE, chunk_size=8, run_ahead=True)
    with thread_of(FakeDevice(num_blocks=24)) as thread:
        assert answers(thread, given, prompts, 9) == [reference(prompt, 9) for prompt in prompts]


def test_a_model_gives_the_same_answers(tmp_path: Path) -> None:
    path = make_model(tmp_path / "llama", FAMILIES["llama"])
    values = {"dtype": "float32", "device": "cpu", "num_blocks": 24, "chunk_size": 24, "num_threads": 1}
    ahead, plain = (EngineSettings.model_validate({**values, "run_ahead": is_on}) for is_on in (True, False))
    device = LocalDevice(path, plain)
    prompts = [[(7 * index + length) % VOCAB_SIZE for index in range(length)] for length in (61, 20, 43)]
    wanted = answers(device, plain, prompts, 24)
    device.kv_cache.fill_(float("nan"))
    with thread_of(device) as thread:
        assert answers(thread, ahead, prompts, 24) == wanted
