"""Copies between the device and host memory: they go with the step that needs them, or come before it if something else
would read or overwrite their blocks first."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from engine import messages as m
from engine.blocks.host_tier import BlockCopy, BlockCopyKind
from engine.core import EngineCore
from engine.device import Ticket
from engine.device_thread import DeviceThread
from engine.step import StepInput
from tests.engine.test_device_thread import HeldDevice, prompt_of
from tests.support.fake_device import FakeDevice, add, assert_idle, make_core, reference, run, tokens_of

PROMPTS = {"a": [5] * 9, "b": [6] * 9, "c": [7] * 9}


class NotingDevice(FakeDevice):
    """Notes which copies came with a step, and which before one."""

    def __init__(self, *args: int, **kwargs: int) -> None:
        super().__init__(*args, **kwargs)
        self.of_steps: list[BlockCopy] = []
        self.before_steps: list[BlockCopy] = []

    def begin(self, step: StepInput) -> Ticket:
        self.of_steps += step.copies
        before = len(self.before_steps)
        ticket = super().begin(step)
        del self.before_steps[before:]
        return ticket

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        self.before_steps += copies
        super().copy(copies)


def noting_core(**settings: object) -> tuple[EngineCore, NotingDevice]:
    core, device = make_core(
        num_blocks=9,
        device_type=NotingDevice,
        host_cache_gb=1e-6,
        preemption_mode="swap",
        swap_space_gb=1e-6,
        **settings,
    )
    assert isinstance(device, NotingDevice)
    return core, device


def kinds(copies: Sequence[BlockCopy]) -> set[BlockCopyKind]:
    return {copy.kind for copy in copies}


def test_copies_of_all_kinds_go_with_steps() -> None:
    core, device = noting_core()
    for name, prompt in PROMPTS.items():
        add(core, name, prompt, max_tokens=8)
    answers = tokens_of(run(core))
    add(core, "again", PROMPTS["a"], max_tokens=8)
    answers |= tokens_of(run(core))
    assert answers == {name: reference(PROMPTS.get(name, PROMPTS["a"]), 8) for name in (*PROMPTS, "again")}
    assert kinds(device.of_steps) == set(BlockCopyKind)
    assert device.before_steps == []
    assert_idle(core)


def a_step_with_a_copy(core: EngineCore) -> None:
    """What the last request computes with evicts what the others left."""
    for name in ("a", "b"):
        add(core, name, PROMPTS[name], max_tokens=8)
        run(core)
    add(core, "c", PROMPTS["c"] * 2, max_tokens=8)


def test_a_step_whose_requests_ended_is_not_begun_but_copies() -> None:
    core, device = noting_core()
    a_step_with_a_copy(core)
    output = core.prepare()
    copies = list(output.host_copies)
    assert kinds(copies) == {BlockCopyKind.DEMOTE}
    core.handle(m.Release("c"))
    assert device.before_steps == copies, "a command may free their blocks, or lend them"
    core.end(core.begin(output))
    assert device.before_steps == copies
    add(core, "a", PROMPTS["a"], max_tokens=8)
    assert tokens_of(run(core)) == {"a": reference(PROMPTS["a"], 8)}
    assert_idle(core)


def test_a_step_that_is_never_begun_copies_before_the_next_one_is_decided() -> None:
    core, device = noting_core()
    a_step_with_a_copy(core)
    copies = list(core.prepare().host_copies)
    assert copies
    assert device.before_steps == []
    core.prepare()
    assert device.before_steps == copies


def test_blocks_that_a_decode_worker_will_read_are_there_before_it_hears_of_them() -> None:
    core, device = noting_core()
    add(core, "a", PROMPTS["a"], max_tokens=8)
    run(core)
    for name in ("b", "c"):
        add(core, name, PROMPTS[name] * 3, max_tokens=2)
        run(core)
    device.of_steps.clear()
    add(core, "reader", PROMPTS["a"], mode=m.RequestMode.PREFILL)
    output = core.prepare()
    assert output.publishes
    assert kinds(device.before_steps) >= {BlockCopyKind.PROMOTE}
    assert output.host_copies == []
    core.end(core.begin(output))
    assert device.of_steps == []
    core.handle(m.Release("reader"))
    run(core)


DEMOTE = BlockCopy(BlockCopyKind.DEMOTE, 3, 0)


def test_a_thread_copies_before_begin_returns() -> None:
    """Alone, the step takes its copies with it; while another one is under way, they do not wait for that one."""
    device = HeldDevice()
    device.host_cache = device.kv_cache.new_zeros(2, *device.kv_cache.shape[1:])
    thread = DeviceThread(device)
    device.kv_cache[3].fill_(7.0)
    first = thread.begin(StepInput(number=1, rows=[prompt_of([1, 2], array("i", [0]))], copies=[DEMOTE]))
    assert device.host_cache[0].eq(7.0).all()
    assert device.begun_copies == [[DEMOTE]]
    device.kv_cache[3].fill_(8.0)
    second = thread.begin(StepInput(number=2, rows=[prompt_of([1, 2], array("i", [1]))], copies=[DEMOTE]))
    assert not device.threads
    assert device.host_cache[0].eq(8.0).all()
    device.kv_cache[3].fill_(9.0)
    device.may_compute.set()
    outputs = [thread.end(first), thread.end(second)]
    thread.close()
    assert [token.token_id for output in outputs for token in output.tokens if token] == reference([1, 2], 1) * 2
    assert device.begun_copies == [[DEMOTE], []]
    assert device.host_cache[0].eq(8.0).all(), "a copy that came late would have overwritten it"
