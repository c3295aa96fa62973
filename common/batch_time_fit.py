"""Fits the model of `common.batch_time` to measured steps, and says how wrong it is.

Least squares of the relative error, with no coefficient below zero (Lawson and Hanson, Solving Least Squares Problems,
chapter 23) and less weight for outliers (Huber 1964). Tables are sums of ramps between knots, so that they cannot fall.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from common.batch_time import FEATURES, MAX_RESIDUAL, BatchTime, BatchTimeKey, Regime, RegimeTime, StepShape, Table
from common.batch_time_file import MAX_COEFFICIENT, MAX_QUANTILE

Floats = np.ndarray[tuple[int], np.dtype[np.float64]]
Matrix = np.ndarray[tuple[int, int], np.dtype[np.float64]]

MIN_STEPS = 24  # of a regime: with fewer it takes another one's model
HUBER = 1.5  # times the median error: errors beyond that count linearly
NUM_ROUNDS = 4
ROUGH_P90, ROUGH_P99 = math.log(1.3), math.log(2.0)  # at least, of a model from a handful of steps
LEAST_SHARE = 0.01  # of the shortest step that was measured: no step is predicted to take less
SHRINK = 8  # a cell of the residual's grid counts fully only with many more steps than that
KNOTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 8192)
HEAD_KNOTS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(slots=True, frozen=True)
class MeasuredStep:
    shape: StepShape
    seconds: float


@dataclass(slots=True, frozen=True, kw_only=True)
class FitError:
    """Relative errors of predictions, as shares of the measured time."""

    num_steps: int
    median: float  # of absolute errors
    p95: float
    bias: float  # mean of signed ones: predicted above measured is positive


def fit(key: BatchTimeKey, steps: Sequence[MeasuredStep]) -> BatchTime:
    """Raises `ValueError` if no regime has enough steps."""
    regimes: dict[Regime, RegimeTime] = {}
    for regime in Regime:
        own = [step for step in steps if step.shape.regime is regime]
        if len(own) >= MIN_STEPS:
            regimes[regime] = fit_regime(own)
    if not regimes:
        raise ValueError(f"{len(steps)} steps are too few to fit a model of time to: {MIN_STEPS} of a kind are needed")
    # What was hardly seen is taken for the sum of all that was: one model of all steps.
    if len(regimes) < len(Regime):
        whole = fit_regime(steps)
        regimes = {regime: regimes.get(regime, whole) for regime in Regime}
    return BatchTime(key=key, regimes=regimes)


def fit_roughly(key: BatchTimeKey, steps: Sequence[MeasuredStep]) -> BatchTime:
    """From a handful of steps: one model for all regimes, with knots only where there is a step, and wide quantiles."""
    rough = fit_regime(steps, knots=sorted({step.shape.num_tokens for step in steps}), head_knots=(0,))
    p90, p99 = max(rough.p90, ROUGH_P90), max(rough.p99, ROUGH_P99)
    return BatchTime(key=key, regimes=dict.fromkeys(Regime, replace(rough, residuals={}, p90=p90, p99=p99)))


def fit_regime(
    steps: Sequence[MeasuredStep], *, knots: Sequence[int] = KNOTS, head_knots: Sequence[int] = HEAD_KNOTS
) -> RegimeTime:
    seconds: Floats = np.array([step.seconds for step in steps])
    shapes = [step.shape for step in steps]
    knots = _useful(knots, [shape.num_tokens for shape in shapes])
    head_knots = _useful(head_knots, [shape.num_head_rows for shape in shapes])
    features = np.array([[getattr(shape, name) for name in FEATURES] for shape in shapes], np.float64)
    columns = np.hstack(
        [
            np.ones((len(steps), 1)),
            _ramps([shape.num_tokens for shape in shapes], knots),
            _ramps([shape.num_head_rows for shape in shapes], head_knots),
            features,
        ]
    )
    solution = _robust(columns, seconds)
    # Steps that were interrupted can leave nothing for the short ones, which count as outliers then.
    first, num_ramps, num_head = (
        max(float(solution[0]), LEAST_SHARE * float(seconds.min())),
        len(knots),
        len(head_knots),
    )
    layers = _table(knots, first, solution[1 : 1 + num_ramps])
    head = _table(head_knots, 0.0, solution[1 + num_ramps : 1 + num_ramps + num_head])
    # On a machine that stands still again and again steps may say anything; files say no more than this.
    coefficients = tuple(min(float(one), MAX_COEFFICIENT) for one in solution[1 + num_ramps + num_head :])
    plain = RegimeTime(layers=layers, head=head, coefficients=coefficients)
    errors = [math.log(step.seconds / plain.plain_seconds(step.shape)) for step in steps]
    with_residual = RegimeTime(
        layers=layers, head=head, coefficients=coefficients, residuals=_residuals(shapes, errors), num_steps=len(steps)
    )
    left = np.array([math.log(step.seconds / with_residual.seconds(step.shape)) for step in steps])
    p90, p99 = np.minimum(np.quantile(left, [0.9, 0.99]), MAX_QUANTILE)
    return RegimeTime(
        layers=layers,
        head=head,
        coefficients=coefficients,
        residuals=with_residual.residuals,
        p90=max(0.0, float(p90)),
        p99=max(0.0, float(p90), float(p99)),
        num_steps=len(steps),
    )


def errors_of(seconds_of: Mapping[int, float] | Sequence[float], steps: Sequence[MeasuredStep]) -> FitError:
    """Errors of the predictions `seconds_of`, one for each of `steps`."""
    relative = np.array([seconds_of[index] / step.seconds - 1 for index, step in enumerate(steps)])
    return FitError(
        num_steps=len(steps),
        median=float(np.median(np.abs(relative))),
        p95=float(np.quantile(np.abs(relative), 0.95)),
        bias=float(relative.mean()),
    )


def model_errors(model: BatchTime, steps: Sequence[MeasuredStep]) -> FitError:
    return errors_of([model.seconds(step.shape) for step in steps], steps)


def quadratic_columns(shape: StepShape) -> list[float]:
    """Features of `T = C1 (t + B) + C2 t2 + C3 t3 + C4 ceil((t + B) / 64) + C5 [B > 0] + C7`, with which the model is
    compared: t prefill tokens, t2 the sum of their squares, t3 context of decodes, B decodes."""
    num_tokens = shape.num_tokens
    return [
        num_tokens,
        shape.chunk_squares,
        shape.decode_context,
        -(-num_tokens // 64),
        float(shape.num_decodes > 0),
        1.0,
    ]


def fit_quadratic(steps: Sequence[MeasuredStep]) -> Floats:
    """The coefficients of `quadratic_columns`."""
    columns = np.array([quadratic_columns(step.shape) for step in steps], np.float64)
    return _robust(columns, np.array([step.seconds for step in steps]))


def quadratic_errors(coefficients: Floats, steps: Sequence[MeasuredStep]) -> FitError:
    predicted = [float(np.dot(coefficients, quadratic_columns(step.shape))) for step in steps]
    return errors_of(predicted, steps)


def _useful(knots: Sequence[int], counts: Sequence[int]) -> list[int]:
    """The knots that have steps on both sides, or one of which is at the end of what was measured."""
    least, most = min(counts), max(counts)
    inside = [knot for knot in knots if least < knot < most]
    return [least, *inside, most] if most > least else [least]


def _ramps(counts: Sequence[int], knots: Sequence[int]) -> Matrix:
    """A column for each piece between two knots: 0 before it, 1 behind it; the last one goes on rising."""
    values = np.array(counts, np.float64)
    columns = [
        np.clip((values - low) / (high - low), 0.0, None if index == len(knots) - 2 else 1.0)
        for index, (low, high) in enumerate(pairwise(knots))
    ]
    columns.append(np.zeros_like(values))  # as many columns as knots
    return np.stack(columns, axis=1)


def _table(knots: Sequence[int], first: float, rises: Floats) -> Table:
    seconds = [float(first)]
    for rise in rises[: len(knots) - 1]:
        seconds.append(seconds[-1] + float(rise))
    slope = (seconds[-1] - seconds[-2]) / (knots[-1] - knots[-2]) if len(knots) > 1 else 0.0
    return Table(tuple(map(float, knots)), tuple(seconds), slope)


def _robust(columns: Matrix, seconds: Floats) -> Floats:
    """Coefficients, none negative, of the least relative errors."""
    weights = np.ones(len(seconds))
    solution: Floats = np.zeros(columns.shape[1])
    for _ in range(NUM_ROUNDS):
        scale = weights / seconds
        solution = nonnegative_least_squares(columns * scale[:, None], weights)
        errors = np.abs(columns @ solution / seconds - 1)
        bound = HUBER * max(float(np.median(errors)), 1e-4)
        weights = np.sqrt(np.minimum(1.0, bound / np.maximum(errors, 1e-12)))
    return solution


def nonnegative_least_squares(columns: Matrix, values: Floats) -> Floats:
    """The x >= 0 of the least |columns x - values|, by active sets."""
    norms = np.linalg.norm(columns, axis=0)
    norms[norms == 0] = 1.0
    scaled = columns / norms
    square, product = scaled.T @ scaled, scaled.T @ values
    count = len(product)
    x: Floats = np.zeros(count)
    is_free = np.zeros(count, bool)
    gradient = product.copy()
    tolerance = 1e-10 * max(1.0, float(np.abs(product).max()))
    for _ in range(5 * count):
        candidates = np.where(~is_free & (gradient > tolerance), gradient, -np.inf)
        best = int(candidates.argmax())
        if not np.isfinite(candidates[best]):
            break
        is_free[best] = True
        while True:
            free = np.flatnonzero(is_free)
            trial = np.linalg.lstsq(square[np.ix_(free, free)], product[free], rcond=None)[0]
            if (trial > 0).all():
                x[:] = 0.0
                x[free] = trial
                break
            down = trial <= 0
            step = float(np.min(x[free][down] / (x[free][down] - trial[down] + 1e-300)))
            x[free] += step * (trial - x[free])
            is_free[free[x[free] <= 1e-14]] = False
            x[~is_free] = 0.0
            if not is_free.any():
                break
        gradient = product - square @ x
    result: Floats = x / norms
    return result


def _residuals(shapes: Sequence[StepShape], errors: Sequence[float]) -> dict[tuple[int, int], float]:
    """Median errors by cell of the grid, shrunk where few steps fell."""
    cells: dict[tuple[int, int], list[float]] = {}
    for shape, error in zip(shapes, errors, strict=True):
        x, y = math.log2(shape.num_tokens + 1), math.log2(shape.decode_context + shape.chunk_pairs + 1)
        cells.setdefault((round(x), round(y)), []).append(error)
    return {
        cell: max(-MAX_RESIDUAL, min(MAX_RESIDUAL, float(np.median(found)) * len(found) / (len(found) + SHRINK)))
        for cell, found in cells.items()
    }
