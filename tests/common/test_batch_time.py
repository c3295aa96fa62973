"""The model of a step's time: what it predicts, how it is fitted, and its file."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from common.batch_time import (
    FEATURES,
    BatchTime,
    BatchTimeKey,
    ChunkTime,
    Regime,
    RegimeTime,
    StepShape,
    Table,
    chunk_shape,
)
from common.batch_time_file import decode, encode, load
from common.batch_time_fit import (
    MeasuredStep,
    fit,
    fit_quadratic,
    model_errors,
    nonnegative_least_squares,
    quadratic_errors,
)
from common.errors import StartupError

KEY = BatchTimeKey(
    spec="0" * 32, quantization="none", device="cpu", processor="a CPU", kernels="avx2", num_threads=2, num_ranks=1
)


def chunk(new: int, past: int = 0) -> StepShape:
    return StepShape(
        num_chunks=1,
        chunk_tokens=new,
        chunk_past=past,
        chunk_pairs=new * past + new * (new + 1) // 2,
        chunk_squares=new * new,
        num_head_rows=1,
    )


def decodes(num: int, context: int) -> StepShape:
    return StepShape(num_decodes=num, decode_context=num * context, longest_context=context, num_head_rows=num)


def both(one: StepShape, other: StepShape) -> StepShape:
    return StepShape(**{name: getattr(one, name) + getattr(other, name) for name in one.__struct_fields__})


def truth(shape: StepShape) -> float:
    """A device that reads its weights in 5 ms, beside which up to 8 tokens are free, and works in tiles of 32."""
    tokens = shape.num_tokens
    layers = 5e-3 if tokens <= 8 else 5e-3 + 1e-4 * (tokens - 8)
    attention = 4e-8 * shape.decode_context + 2e-9 * shape.chunk_pairs + 1e-7 * shape.chunk_past
    return layers + 2e-4 * shape.num_head_rows + attention


def random_shape(rng: random.Random, longest: int) -> StepShape:
    some, prompt = (
        decodes(rng.randint(1, 32), rng.randint(1, longest)),
        chunk(rng.randint(2, 512), rng.randint(0, longest)),
    )
    return rng.choice((some, prompt, both(some, prompt)))


def measured(seed: int, num: int = 400, longest: int = 2000, noise: float = 0.01) -> list[MeasuredStep]:
    rng = random.Random(seed)
    shapes = [random_shape(rng, longest) for _ in range(num)]
    return [MeasuredStep(shape, truth(shape) * (1 + rng.gauss(0, noise))) for shape in shapes]


@pytest.fixture(scope="module")
def model() -> BatchTime:
    return fit(KEY, measured(1))


def test_a_chunk_s_time_is_that_of_its_shape() -> None:
    """`ChunkTime` is a quicker way to the same."""
    regime = RegimeTime(
        layers=Table((0.0, 8.0, 64.0), (0.005, 0.006, 0.02), 1e-4),
        head=Table((0.0, 16.0), (0.001, 0.002), 1e-4),
        coefficients=tuple(1e-7 * (number + 1) for number in range(len(FEATURES))),
        residuals={(6, 12): 0.1, (6, 13): -0.2, (9, 17): 0.3},
    )
    plain = replace(regime, residuals={}, head=Table((0.0,), (0.001,), 1e-3))
    times = (regime, plain)
    model = BatchTime(key=KEY, regimes={Regime.DECODE: plain, Regime.PREFILL: times[0], Regime.MIXED: times[1]})
    other = BatchTime(key=KEY, regimes={Regime.DECODE: plain, Regime.PREFILL: times[1], Regime.MIXED: times[0]})
    for new, past in ((1, 0), (70, 0), (512, 300)):
        for beside in (StepShape(), decodes(1, 20), decodes(30, 700)):
            shape = chunk_shape(new, past, beside)
            assert shape == structs.replace(both(chunk(new, past), beside), longest_context=beside.longest_context)
            for one in (model, other):
                found = ChunkTime(one, beside.num_decodes, beside.decode_context, beside.longest_context)
                assert found.seconds(new, past) == pytest.approx(one.seconds(shape), rel=1e-12)
                assert found.kept_seconds(new, past) == found.kept_seconds(new, past) == found.seconds(new, past)


@pytest.mark.parametrize("regime", Regime)
def test_other_steps_are_predicted(model: BatchTime, regime: Regime) -> None:
    steps = [step for step in measured(2) if step.shape.regime is regime]
    error = model_errors(model, steps)
    assert error.median < 0.03
    assert error.p95 < 0.10
    assert abs(error.bias) < 0.01


def test_longer_contexts_than_were_measured(model: BatchTime) -> None:
    """The terms have the right form, so they hold where nothing was measured."""
    steps = [step for step in measured(3, longest=16_000) if step.shape.longest_context + step.shape.chunk_past > 8000]
    assert model_errors(model, steps).median < 0.05


def test_the_quadratic_formula_is_worse(model: BatchTime) -> None:
    steps = measured(2)
    assert quadratic_errors(fit_quadratic(measured(1)), steps).median > 2 * model_errors(model, steps).median


def test_outliers_change_little(model: BatchTime) -> None:
    rng = random.Random(5)
    steps = [replace(step, seconds=step.seconds * 4) if rng.random() < 0.05 else step for step in measured(1)]
    assert model_errors(fit(KEY, steps), measured(2)).median < 0.03


def test_quantiles_hold() -> None:
    model = fit(KEY, measured(1, 3000, noise=0.05))
    steps = measured(2, 3000, noise=0.05)
    for name, share in (("p90", 0.9), ("p99", 0.99)):
        below = sum(step.seconds <= getattr(model.predict(step.shape), name) for step in steps) / len(steps)
        assert below == pytest.approx(share, abs=0.03)


def test_a_regime_that_was_not_measured_takes_what_there_is() -> None:
    steps = [step for step in measured(1) if step.shape.regime is not Regime.MIXED]
    model = fit(KEY, steps)
    mixed = [step for step in measured(2) if step.shape.regime is Regime.MIXED]
    assert model_errors(model, mixed).median < 0.15


def test_too_few_steps() -> None:
    with pytest.raises(ValueError, match="5 steps are too few"):
        fit(KEY, measured(1)[:5])


shapes = st.builds(
    both,
    st.one_of(st.just(StepShape()), st.builds(decodes, st.integers(1, 64), st.integers(1, 4000))),
    st.one_of(st.just(StepShape()), st.builds(chunk, st.integers(2, 2048), st.integers(0, 4000))),
)


@given(shapes, st.sampled_from(StepShape.__struct_fields__), st.integers(1, 1000))
def test_no_prediction_falls_if_a_step_grows(shape: StepShape, name: str, more: int) -> None:
    """Within a regime, and but for the residual, which says what was measured."""
    regime = fit_once().regimes[Regime.MIXED]
    larger = structs.replace(shape, **{name: getattr(shape, name) + more})
    assert regime.plain_seconds(larger) >= regime.plain_seconds(shape)


_kept: list[BatchTime] = []


def fit_once() -> BatchTime:
    if not _kept:
        _kept.append(fit(KEY, measured(1)))
    return _kept[0]


@given(shapes, st.integers(0, 3000), st.integers(1, 2048), st.floats(0.001, 0.5))
def test_tokens_within_is_the_largest_chunk_that_fits(shape: StepShape, past: int, most: int, seconds: float) -> None:
    plain = {name: replace(regime, residuals={}) for name, regime in fit_once().regimes.items()}
    model = replace(fit_once(), regimes=plain)
    found = model.tokens_within(seconds, shape, past, most)
    assert 0 <= found <= most
    for new in {found, found + 1} & set(range(1, most + 1)):
        more = structs.replace(
            shape,
            num_chunks=shape.num_chunks + 1,
            chunk_tokens=shape.chunk_tokens + new,
            chunk_past=shape.chunk_past + past,
            chunk_pairs=shape.chunk_pairs + new * past + new * (new + 1) // 2,
        )
        assert (model.predict(more).p90 <= seconds * (1 + 1e-9)) == (new == found) or model.predict(more).p90 == (
            pytest.approx(seconds, rel=1e-6)
        )


@given(st.data())
def test_tokens_within_whatever_the_table(data: st.DataObject) -> None:
    """Knots that are no whole numbers, flat parts and steep ones, and attention that outweighs all."""
    knots = sorted(data.draw(st.sets(st.floats(0.0, 80.0), min_size=1, max_size=6)))
    rises = data.draw(st.lists(st.sampled_from([0.0, 0.001, 0.5]), min_size=len(knots), max_size=len(knots)))
    layers = Table(tuple(knots), tuple(accumulate(rises)), data.draw(st.sampled_from([0.0, 0.01])))
    pair_s = data.draw(st.sampled_from([0.0, 1e-6, 0.01]))
    regime = RegimeTime(layers=layers, head=Table(), coefficients=(0.0, 0.0, pair_s, *(0.0,) * (len(FEATURES) - 3)))
    model = BatchTime(key=KEY, regimes=dict.fromkeys(Regime, regime))
    num, past, most = data.draw(st.tuples(st.integers(0, 60), st.integers(0, 50), st.integers(0, 60)))
    seconds = data.draw(st.sampled_from([-1.0, 0.0, 0.001, 0.3, 0.5, 0.7, 1.1, math.inf]))

    def fits(new: int) -> bool:
        return layers.at(num + new) + pair_s * (new * past + new * (new + 1) * 0.5) <= seconds

    beside = StepShape(num_decodes=num)
    expected = max([new for new in range(1, most + 1) if fits(new)], default=0)
    assert model.tokens_within(seconds, beside, past, most) == expected


def test_a_machine_that_stands_still_again_and_again_makes_a_file_that_can_be_read() -> None:
    steps = [
        replace(step, seconds=step.seconds * (100_000 if number % 5 == 0 else 1))
        for number, step in enumerate(measured(seed=9))
    ]
    made = fit(KEY, steps)
    assert decode(encode(made)) == made


def test_a_file_s_tables_have_what_earlier_releases_wrote(model: BatchTime) -> None:
    """Workers and routers of two releases tell each other their models, and files outlive an upgrade."""
    for regime in json.loads(encode(model))["regimes"].values():
        for name in ("layers", "head"):
            assert set(regime[name]) == {"knots", "seconds", "last_slope"}


def test_the_residual_fades_away_from_the_data() -> None:
    flat = Table((1.0,), (0.01,), 0.0)
    regime = RegimeTime(
        layers=flat, head=Table(), coefficients=(0.0,) * len(FEATURES), residuals={(3, 10): 0.5}, num_steps=9
    )
    near, far = decodes(7, 146), decodes(64, 4000)  # 2**3 - 1 tokens, some 2**10 of attention
    assert regime.seconds(near) == pytest.approx(0.01 * 2.718281828**0.5, rel=0.01)
    assert regime.seconds(far) == 0.01


def test_least_squares_without_negative_coefficients() -> None:
    columns = np.array([[1.0, 1.0, 0.0], [1.0, 2.0, 0.0], [1.0, 3.0, 1.0], [1.0, 4.0, 0.0]])
    assert nonnegative_least_squares(columns, columns @ [2.0, 0.5, 3.0]) == pytest.approx([2.0, 0.5, 3.0])
    found = nonnegative_least_squares(columns, columns @ [2.0, -0.5, 3.0])
    assert found[1] == 0.0
    assert (found >= 0).all()


def test_a_file_gives_the_same_predictions(model: BatchTime, tmp_path: Path) -> None:
    path = tmp_path / "time.json"
    path.write_bytes(encode(model))
    again = load(path, KEY)
    assert again == model
    assert decode(encode(again)) == model


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"p90": 800.0}, "a quantile beyond 100 times"),
        ({"layers": Table((1.0, 2.0), (1e308, 1e308))}, "beyond 3600 s"),
        ({"layers": Table((1.0, 2e9), (1.0, 2.0))}, "for 16777216 tokens"),
        ({"head": Table((1.0,), (1.0,), 1e300)}, "beyond 3600 s"),
        ({"layers": Table()}, "steps that take no time"),
        ({"coefficients": (2.0,) * len(FEATURES)}, "a coefficient beyond 1.0 s"),
    ],
)
def test_times_that_no_step_takes_are_refused(model: BatchTime, change: dict[str, Any], reason: str) -> None:
    """A router adds and multiplies what workers say."""
    regimes = {**model.regimes, Regime.DECODE: replace(model.regimes[Regime.DECODE], **change)}
    with pytest.raises(ValueError, match=reason):
        decode(encode(replace(model, regimes=regimes)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data[:50], "is of no use"),
        (lambda data: b"[]", "it has schema None, this Baton reads 1"),
        (lambda data: data.replace(b'"schema": 1', b'"schema": 2'), "it has schema 2, this Baton reads 1"),
        (lambda data: data.replace(b'"chunk_past"', b'"chunk_passed"', 1), "has other coefficients than"),
        (lambda data: data.replace(b'"mixed"', b'"mixt"'), "is of no use"),
        (lambda data: data.replace(b'"cpu"', b'"cuda:0"'), "is for device cuda:0, here it is cpu"),
    ],
)
def test_files_of_no_use(model: BatchTime, tmp_path: Path, change: object, message: str) -> None:
    path = tmp_path / "time.json"
    path.write_bytes(change(encode(model)))  # type: ignore[operator]
    with pytest.raises(StartupError, match=message) as error:
        load(path, KEY)
    assert "\n" not in str(error.value)
    with pytest.raises(StartupError, match="cannot be read"):
        load(tmp_path / "none", KEY)
