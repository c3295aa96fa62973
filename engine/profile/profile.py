"""One whole profile: measure, fit, and say how good the model is."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from common.batch_time import BatchTime, Regime
from common.batch_time_fit import FitError, MeasuredStep, fit, fit_quadratic, model_errors, quadratic_errors
from common.config import EngineSettings
from common.errors import StartupError
from engine.learning.key import key_of
from engine.learning.quick import limits_of
from engine.local.device import LocalDevice
from engine.profile.measure import Run, measure_workload

PARTS = ("measuring", "measuring other steps", "running requests")
_KV_SPREAD = 0.05  # of random KV: memory that nobody wrote to is faster to read than any other


@dataclass(slots=True, frozen=True)
class Comparison:
    """Errors on steps that the model was not fitted to."""

    what: str
    regime: Regime
    model: FitError
    quadratic: FitError  # of the plain formula in counts of tokens, fitted to the same steps


@dataclass(slots=True, frozen=True, kw_only=True)
class Profile:
    time: BatchTime
    fitted: list[MeasuredStep]
    other_run: list[MeasuredStep]
    workload: list[MeasuredStep]
    comparisons: list[Comparison]
    noise: float  # median relative error that a perfect model would have
    drift: float  # spread of the reference step over the run, as a share of its median


def make_profile(
    device: LocalDevice, settings: EngineSettings, *, minutes: float, progress: Callable[[str, float], None]
) -> Profile:
    """Takes `minutes`. `progress` hears what is done, and which share of it.

    Raises `StartupError` with one line if so few steps were measured that nothing can be fitted to them.
    """
    device.kv_cache.normal_(0, _KV_SPREAD)
    seconds = 60 * minutes
    limits = limits_of(device, settings)
    run = Run(device, limits, seed=1, with_edges=True)
    fitted = run.measure(0.55 * seconds, partial(progress, PARTS[0]))
    noise = run.noise()
    other = Run(device, limits, seed=2, with_edges=False)
    other_run = other.measure(0.25 * seconds, partial(progress, PARTS[1]))
    progress(PARTS[2], 0.0)
    workload = measure_workload(device, settings, seconds=0.2 * seconds, seed=3)
    progress(PARTS[2], 1.0)
    try:
        time = fit(key_of(device, settings), fitted)
    except ValueError as error:
        raise StartupError(f"{error}; measure for longer (--minutes)") from error
    quadratic = fit_quadratic(fitted)
    comparisons = [
        Comparison(what, regime, model_errors(time, own), quadratic_errors(quadratic, own))
        for what, steps in (("another run", other_run), ("requests", workload))
        for regime in Regime
        if len(own := [step for step in steps if step.shape.regime is regime]) > 1
    ]
    low, middle, high = statistics.quantiles(run.references, n=4)
    return Profile(
        time=time,
        fitted=fitted,
        other_run=other_run,
        workload=workload,
        comparisons=comparisons,
        noise=noise,
        drift=(high - low) / middle,
    )


def verdict(profile: Profile) -> list[str]:
    """How good the model is, and what it does not know, in plain words."""
    lines = []
    for one in profile.comparisons:
        if one.what == "another run":
            word = "good" if one.model.median <= 0.03 else "fair" if one.model.median <= 0.08 else "poor"
            lines.append(f"{one.regime}: {word}; half of the predictions are within {one.model.median:.1%}")
    if profile.noise > 0.03 or profile.drift > 0.10:
        lines.append(
            f"the machine was not quiet: two measurements of one step differ by {2 * profile.noise:.1%}, and its speed "
            f"changed by {profile.drift:.0%}; measure again when nothing else runs"
        )
    seen = {regime: [s for s in profile.fitted if s.shape.regime is regime] for regime in Regime}
    lines += [
        f"{regime}: not measured; taken from all other steps" for regime, steps in seen.items() if len(steps) < 24
    ]
    longest = max((step.shape.longest_context for step in profile.fitted), default=0)
    tokens = max((step.shape.num_tokens for step in profile.fitted), default=0)
    lines.append(f"beyond {tokens} new tokens or contexts of {longest} tokens it only continues its lines")
    return lines
