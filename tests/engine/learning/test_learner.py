"""What an engine learns of its steps' times, on clocks of the tests' own."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from common.batch_time import BatchTime, Regime, StepShape
from common.batch_time_fit import MeasuredStep, fit, fit_roughly
from engine.blocks.host_tier import BlockCopy, BlockCopyKind
from engine.device import Ticket, do_nothing
from engine.learning.learner import LOOK_EVERY, MIN_STEPS, REFIT_S, TRUSTED_STEPS, Learner, Source
from engine.learning.observed_device import IDLE_S, ObservedDevice
from engine.learning.quick import points
from engine.profile.design import Limits, rows_of
from engine.step import StepInput, StepOutput, StepRow
from tests.common.test_batch_time import KEY, chunk, decodes, random_shape, truth
from tests.support.fake_device import TimedDevice


class Steps:
    """Gives a learner steps that take `truth` of their shape times `slowness`, a step every 10 ms."""

    def __init__(self, learner: Learner, seed: int = 1) -> None:
        self.learner = learner
        self.now = 0.0
        self._rng = random.Random(seed)

    def give(self, num: int, slowness: float = 1.0, shape: Callable[[random.Random], StepShape] | None = None) -> None:
        for _ in range(num):
            self.now += 0.01
            one = shape(self._rng) if shape else random_shape(self._rng, 800)
            self.learner.observe(one, truth(one) * slowness, self.now, is_clean=True)


def some_decodes(rng: random.Random) -> StepShape:
    return decodes(rng.randint(1, 32), rng.randint(20, 800))


def at_once(work: Callable[[], None]) -> None:
    work()


def learner(model: BatchTime | None = None, source: Source = Source.NONE) -> Learner:
    return Learner(KEY, model, source, 0.0, beside=at_once)


def good_model() -> BatchTime:
    rng = random.Random(5)
    shapes = [random_shape(rng, 800) for _ in range(600)]
    return fit(KEY, [MeasuredStep(shape, truth(shape)) for shape in shapes])


def error(model: BatchTime | None, shape: StepShape, slowness: float = 1.0) -> float:
    assert model is not None
    return abs(model.seconds(shape) / (truth(shape) * slowness) - 1)


def test_an_engine_that_knows_nothing_learns() -> None:
    one = learner()
    steps = Steps(one)
    steps.give(MIN_STEPS - 1)
    assert one.model is None
    steps.give(2 * LOOK_EVERY)
    assert one.model is not None
    assert one.standing.source is Source.QUICK  # others do not decide by it yet
    steps.give(TRUSTED_STEPS)
    steps.now += REFIT_S
    steps.give(MIN_STEPS + LOOK_EVERY)
    assert one.standing.source is Source.LEARNED
    assert one.standing.error_median < 0.05
    assert one.standing.version > 1
    for shape in (decodes(7, 300), chunk(200, 100)):
        assert error(one.model, shape) < 0.05


def test_what_was_not_seen_is_as_the_first_model_says_at_the_speed_of_now() -> None:
    """Only decodes come, and the machine is half as fast as it was profiled."""
    one = learner(good_model(), Source.FILE)
    steps = Steps(one)
    steps.give(MIN_STEPS, slowness=2.0, shape=some_decodes)
    steps.now += REFIT_S
    steps.give(3 * MIN_STEPS, slowness=2.0, shape=some_decodes)
    assert one.standing.source is Source.LEARNED
    assert error(one.model, decodes(12, 200), 2.0) < 0.05
    assert error(one.model, chunk(300), 2.0) < 0.25
    assert error(one.model, chunk(300), 1.0) > 0.5


def test_drift_is_noticed_told_and_learned(caplog: pytest.LogCaptureFixture) -> None:
    one = learner(good_model(), Source.FILE)
    steps = Steps(one)
    steps.give(4 * LOOK_EVERY)
    assert not one.standing.drifts
    assert one.model is not None
    before = one.model.predict(decodes(8, 300))
    steps.give(8 * LOOK_EVERY, slowness=1.5)
    assert one.standing.drifts
    assert "steps take other times" in caplog.text
    after = one.model.predict(decodes(8, 300))
    assert after.p90 > 1.3 * before.p90  # wider, until it has learned
    steps.now += REFIT_S
    steps.give(MIN_STEPS + 4 * LOOK_EVERY, slowness=1.5)
    assert not one.standing.drifts
    assert error(one.model, decodes(8, 300), 1.5) < 0.06


def test_drift_long_after_the_last_fit_is_learned_from_steps_of_now() -> None:
    one = learner(good_model(), Source.FILE)
    steps = Steps(one)
    steps.give(MIN_STEPS)
    steps.now += REFIT_S
    steps.give(MIN_STEPS)
    assert one.standing.source is Source.LEARNED
    steps.now += 1.3 * REFIT_S  # so long that only a drift makes a fit due
    steps.give(MIN_STEPS)
    version = one.standing.version
    while not one.standing.drifts:
        steps.give(LOOK_EVERY, slowness=3.0)
    steps.give(LOOK_EVERY, slowness=3.0)
    assert one.standing.drifts
    assert one.standing.made_at < steps.now - REFIT_S  # nothing was fitted meanwhile
    steps.give(MIN_STEPS + LOOK_EVERY, slowness=3.0)
    assert one.standing.version > version
    assert error(one.model, decodes(8, 300), 3.0) < 0.1


def test_a_fit_that_a_drift_overtakes_is_dropped() -> None:
    begun: list[Callable[[], None]] = []
    one = Learner(KEY, good_model(), Source.FILE, 0.0, beside=begun.append)
    steps = Steps(one)
    steps.now += REFIT_S
    steps.give(MIN_STEPS + LOOK_EVERY)
    assert len(begun) == 1
    while not one.standing.drifts:
        steps.give(LOOK_EVERY, slowness=3.0)
    begun[0]()
    steps.give(1, slowness=3.0)
    assert one.standing.source is Source.FILE
    steps.now += REFIT_S
    steps.give(MIN_STEPS + LOOK_EVERY, slowness=3.0)
    assert len(begun) == 2


def test_without_another_thread_nothing_is_learned_and_steps_go_on(caplog: pytest.LogCaptureFixture) -> None:
    def refused(_: Callable[[], None]) -> None:
        raise RuntimeError("can't start new thread")

    one = Learner(KEY, good_model(), Source.FILE, 0.0, beside=refused)
    steps = Steps(one)
    steps.now += REFIT_S
    steps.give(MIN_STEPS + LOOK_EVERY)
    assert "can't start new thread" in str([vars(record) for record in caplog.records])
    assert one.standing.source is Source.FILE


def test_a_good_model_is_fitted_anew_less_and_less_often() -> None:
    one = learner(good_model(), Source.FILE)
    steps = Steps(one)
    versions = []
    for _ in range(8):
        steps.now += REFIT_S
        steps.give(MIN_STEPS)
        versions.append(one.standing.version)
    assert len(set(versions)) < 6


def test_a_fit_that_fails_leaves_the_model_that_is_there(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> BatchTime:
        raise ValueError("no")

    monkeypatch.setattr("engine.learning.learner.fit", fails)
    model = good_model()
    one = learner(model, Source.FILE)
    steps = Steps(one)
    steps.now += REFIT_S
    steps.give(MIN_STEPS + LOOK_EVERY)
    assert "could be fitted" in caplog.text
    assert one.standing.source is Source.FILE
    assert one.model is not None
    assert one.model.seconds(decodes(3, 100)) == model.seconds(decodes(3, 100))


def test_a_handful_of_steps_give_a_rough_model() -> None:
    shapes = [*(decodes(num, 64) for num in (1, 4, 16)), decodes(4, 1000), *(chunk(num) for num in (16, 64, 256))]
    rough = fit_roughly(KEY, [MeasuredStep(shape, truth(shape)) for shape in shapes])
    assert set(rough.regimes) == set(Regime)
    for shape in (decodes(8, 64), chunk(128), decodes(12, 600)):
        assert error(rough, shape) < 0.35
    one = rough.predict(decodes(8, 64))
    assert one.p99 >= 2 * one.median * (1 - 1e-9) > one.p90 > one.median


@given(st.lists(st.floats(1e-5, 30.0), min_size=4, max_size=20))
@example([1.0, 1.0, 1.0, 0.25, 24.0])  # without a least time, one step was predicted to take none
def test_any_measured_times_give_a_rough_model(seconds: list[float]) -> None:
    """As on a machine whose processor is taken away in mid-step."""
    limits = Limits(num_blocks=512, block_size=16, max_model_len=8192, vocab_size=49152, max_rows=64, max_tokens=512)
    rows = [rows_of(point, limits, random.Random(1)) for point in points(limits)]
    shapes = [StepInput(number=0, rows=one).shape for one in rows]
    rough = fit_roughly(KEY, [MeasuredStep(shape, took) for shape, took in zip(shapes, seconds, strict=False)])
    for shape in shapes:
        assert 0 < rough.seconds(shape) < math.inf


# ------------------------------------------------------------------------------- which steps are learned from


class Observed:
    def __init__(self) -> None:
        self.inner = TimedDevice(lambda _: 0.02)
        self.learner = learner()
        self.seen: list[bool] = []
        self.core_s, self.num_switches = 0.0, 0
        self.core_share = 1.0  # of the time
        observe = self.learner.observe

        def note(shape: StepShape, seconds: float, now: float, *, is_clean: bool) -> float | None:
            self.seen.append(is_clean)
            return observe(shape, seconds, now, is_clean=is_clean)

        self.learner.observe = note  # type: ignore[method-assign]
        self.device = ObservedDevice(
            self.inner,
            self.learner,
            clock=lambda: self.inner.now,
            cores=lambda: (self.inner.now * self.core_share, self.num_switches),
        )

    def step(self, *, idle_s: float = 0.001, copies: Sequence[BlockCopy] = ()) -> None:
        self.inner.now += idle_s
        row = StepRow(token_ids=[1], num_computed_tokens=3, block_ids=[0])
        ticket = self.device.begin(StepInput(number=self.device.next_number(), rows=[row], copies=copies))
        self.device.end(ticket, lambda: None)


def test_steps_after_a_pause_are_not_learned_from() -> None:
    one = Observed()
    one.step()
    one.step()
    one.step(idle_s=2 * IDLE_S)
    one.step()
    assert one.seen == [False, True, False, True]


def test_steps_that_are_profiled_are_not_learned_from() -> None:
    one = Observed()
    profiled = iter([False, True, False])
    one.device.is_profiled = lambda: next(profiled)
    one.step()  # the first one is never clean, so nobody asks
    for _ in range(3):
        one.step()
    assert one.seen == [False, True, False, True]


def test_steps_with_copies_to_host_memory_are_not_learned_from() -> None:
    one = Observed()
    one.step()
    one.device.copy([])
    one.step()
    one.device.copy([BlockCopy(BlockCopyKind.SWAP_IN, 0, 0)])
    one.step()
    one.step()
    one.step(copies=[BlockCopy(BlockCopyKind.SWAP_IN, 0, 0)])
    one.step()
    assert one.seen == [False, True, False, True, False, True]


@pytest.mark.parametrize("is_switched", [True, False])
def test_steps_that_waited_for_a_core_are_not_learned_from(is_switched: bool) -> None:
    one = Observed()
    one.step()
    one.step()
    if is_switched:
        end = one.inner.end

        def switched(ticket: Ticket, meanwhile: Callable[[], None] = do_nothing) -> StepOutput:
            one.num_switches += 10
            return end(ticket, meanwhile)

        one.inner.end = switched  # type: ignore[method-assign]
    else:
        one.core_share = 0.5
    one.step()
    assert one.seen == [False, True, False]


def test_a_step_that_failed_is_no_step() -> None:
    one = Observed()
    one.step()
    one.inner.fail_next = True
    one.step()
    assert one.seen == [False]


def test_predictions_stay_finite() -> None:
    one = learner(good_model(), Source.FILE)
    for shape in (StepShape(), decodes(1, 1), chunk(8192, 8192)):
        predicted = one.observe(shape, 1e-9, 0.0, is_clean=False)
        assert predicted is not None
        assert math.isfinite(predicted)
