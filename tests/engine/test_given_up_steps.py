"""Steps that end early, between two layers: nobody wants what they compute, or somebody else is in a hurry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from common import metrics
from common.config import EngineSettings
from common.sampling import SamplingParams
from common.types import SampledToken
from engine import messages as m
from engine.core import EngineCore
from engine.device import StepGivenUp, Ticket, do_nothing
from engine.device_thread import DeviceThread
from engine.local.device import LocalDevice
from engine.sampling.draws import draw
from engine.scheduling.slack import MOST_GIVEN_UP
from engine.step import StepInput, StepOutput, StepRow
from tests.engine.test_slack import TIME, Timed
from tests.engine.tiny_models import make_model
from tests.support.fake_device import (
    FakeDevice,
    TimedDevice,
    add,
    assert_idle,
    make_core,
    reference,
    run,
    tokens_of,
)

NUM_LAYERS = 10


def num_given_up(reason: str) -> float:
    return metrics.worker_steps_given_up.labels(reason)._value.get()


class LayeredDevice(FakeDevice):
    def __init__(self, num_blocks: int = 64, max_model_len: int = 200, num_host_blocks: int = 0) -> None:
        super().__init__(num_blocks, max_model_len, num_host_blocks)
        self.info = replace(self.info, gives_up=True)
        self.in_layer: Callable[[int], None] = lambda _: None

    def compute_step(self, step: StepInput, meanwhile: Callable[[], None]) -> StepOutput:
        for layer in range(NUM_LAYERS):
            self.in_layer(layer)
            try:
                meanwhile()
            except StepGivenUp:
                return StepOutput.given_up(step)
        return super().compute_step(step, do_nothing)


def layered(**options: object) -> tuple[EngineCore, LayeredDevice]:
    core, device = make_core(device_type=LayeredDevice, **options)  # type: ignore[arg-type]
    assert isinstance(device, LayeredDevice)
    return core, device


@pytest.mark.parametrize("options", [{}, {"speculation": "ngram"}])
def test_a_step_whose_requests_have_all_ended_is_given_up(options: dict[str, object]) -> None:
    core, device = layered(**options)
    before = num_given_up("ended")
    layers: list[int] = []

    def in_layer(layer: int) -> None:
        layers.append(layer)
        if layer == 3:
            core.handle(m.Release("first"))
            core.handle(m.Release("second"))

    device.in_layer = in_layer
    add(core, "first", [1, 2, 3, 4, 5, 6])
    add(core, "second", [7, 8])
    assert core.step()
    assert layers == [0, 1, 2, 3]
    assert device.num_tokens_per_step == []
    assert num_given_up("ended") == before + 1
    assert_idle(core)
    device.in_layer = lambda _: None
    add(core, "third", [1, 2, 3, 4, 5, 6])
    assert tokens_of(run(core))["third"] == reference([1, 2, 3, 4, 5, 6], 8)


def test_a_step_goes_on_for_the_last_of_its_requests() -> None:
    core, device = layered()
    before = num_given_up("ended")
    device.in_layer = lambda layer: core.handle(m.Release("first")) if layer == 3 else None
    add(core, "first", [1, 2, 3, 4, 5, 6])
    add(core, "second", [7, 8])
    assert tokens_of(run(core)) == {"second": reference([7, 8], 8)}
    assert num_given_up("ended") == before


class LayeredTime(TimedDevice):
    """Layers that take time, and what happens in them."""

    def __init__(self) -> None:
        super().__init__(lambda step: TIME.seconds(step.shape), 500)
        self.info = replace(self.info, gives_up=True)
        self.at: dict[float, Callable[[], None]] = {}  # by the time from which on it is called, once
        self.given_up_at: list[float] = []

    def end(self, ticket: Ticket, meanwhile: Callable[[], None] = do_nothing) -> StepOutput:
        step = self._begun.pop(ticket.number)
        elapsed_s = TIME.seconds(step.shape)
        for _ in range(NUM_LAYERS):
            self.now += elapsed_s / NUM_LAYERS
            for due in [due for due in self.at if due <= self.now]:
                self.at.pop(due)()
            try:
                meanwhile()
            except StepGivenUp:
                self.given_up_at.append(self.now)
                return StepOutput.given_up(step)
        return StepOutput(
            tokens=[None if row.draw is None else SampledToken(1) for row in step.rows], elapsed_s=elapsed_s
        )


def layered_time() -> tuple[Timed, LayeredTime]:
    device = LayeredTime()
    return Timed(device=device, chunk_size=512), device


def first_ms(engine: Timed) -> dict[str, float]:
    """When each first token came."""
    engine.run()
    return {request_id: 1000 * times[0] for request_id, times in engine.token_times.items()}


def test_a_long_prompt_makes_way_for_one_that_cannot_wait() -> None:
    (engine, device), before = layered_time(), num_given_up("urgent")
    engine.ask("long", 300)  # 310 ms
    device.at[0.1] = lambda: engine.ask("urgent", 40, ttft_ms=100)  # 50 ms
    first_at = first_ms(engine)
    assert device.given_up_at == pytest.approx([0.124])
    assert first_at["urgent"] < 124 + 100
    assert first_at["long"] > 124 + 50 + 300
    assert num_given_up("urgent") == before + 1


@pytest.mark.parametrize(
    ("num_prompt", "ttft_ms", "long_ttft_ms"),
    [
        (40, 400, None),  # there is time for both
        (40, None, None),  # best effort
        (40, 30, None),  # cannot be in time anyhow
        (40, 100, 350),  # the long one would be late
    ],
)
def test_a_step_goes_on_if_giving_it_up_helps_nobody(
    num_prompt: int, ttft_ms: float | None, long_ttft_ms: float | None
) -> None:
    engine, device = layered_time()
    engine.ask("long", 300, ttft_ms=long_ttft_ms)
    device.at[0.1] = lambda: engine.ask("next", num_prompt, ttft_ms=ttft_ms)
    first_at = first_ms(engine)
    assert device.given_up_at == []
    assert first_at["long"] == pytest.approx(310)


def test_decodes_are_not_given_up() -> None:
    engine, device = layered_time()
    engine.ask("answer", 20, max_tokens=4)
    device.at[0.035] = lambda: engine.ask("urgent", 5, ttft_ms=19)
    engine.run()
    assert device.given_up_at == []


def test_a_prompt_makes_way_so_often_and_no_more() -> None:
    engine, device = layered_time()
    engine.ask("long", 300)
    for number in range(MOST_GIVEN_UP + 2):
        device.at[0.1 + 0.2 * number] = lambda: engine.ask(f"urgent {device.now}", 40, ttft_ms=100)
    first_at = first_ms(engine)
    assert len(device.given_up_at) == MOST_GIVEN_UP
    assert "long" in first_at


def test_a_device_ends_a_step_between_layers_and_computes_it_later(tmp_path: Path) -> None:
    settings = EngineSettings(device="cpu", dtype="float32", num_threads=1, num_blocks=8)
    device = LocalDevice(make_model(tmp_path / "model"), settings)
    prompt = StepRow(
        token_ids=list(range(3, 23)),
        num_computed_tokens=0,
        block_ids=[0, 1],
        draw=draw(SamplingParams(temperature=0.0), 0),
    )
    (expected,) = device.execute([replace(prompt, block_ids=[2, 3])])
    calls = 0

    def give_up() -> None:
        nonlocal calls
        calls += 1
        raise StepGivenUp

    output = device.compute([prompt], give_up)
    assert (output.is_given_up, output.tokens, output.failures, calls) == (True, [None], {}, 1)
    assert device.execute([prompt]) == [expected]


def test_a_device_that_runs_ahead_gives_nothing_up() -> None:
    thread = DeviceThread(LayeredDevice())
    assert not thread.info.gives_up
    thread.close()
