"""Learns how long steps take from the engine's own steps, beside them.

`observe` costs some microseconds a step. A new model is fitted in a thread now and then, to the latest steps of every
size that was seen. Sizes that were not seen yet are filled from the model that the engine started with, at the speed
that the steps that were seen have now.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum

from common.batch_time import BatchTime, BatchTimeKey, Regime, RegimeTime, StepShape, chunk_shape
from common.batch_time_fit import MeasuredStep, fit

log = logging.getLogger(__name__)

WINDOW = 256  # steps of a regime whose errors count
LOOK_EVERY = 64  # clean steps
KEPT_OF_SIZE = 8  # latest steps of one size
MIN_STEPS = 256  # clean, before a model is fitted to them
TRUSTED_STEPS = 1024  # clean, before a model that began as a rough one is good enough for others to decide by
REFIT_S = 30.0  # at least between two fits; twice as long each time that the model was good already, up to MAX_REFIT_S
MAX_REFIT_S = 600.0
GOOD_ERROR = 0.05  # median
DRIFT = math.log(1.15)  # the median of the signed error beyond which the device is thought to have changed


class Source(StrEnum):
    NONE = "none"
    QUICK = "quick"  # some steps at start
    FILE = "file"  # `baton profile`
    LEARNED = "learned"  # this engine's own steps


@dataclass(slots=True, frozen=True)
class KnownTimes:
    """What an engine knows of a device's times when it starts."""

    key: BatchTimeKey
    model: BatchTime | None  # None: nothing
    source: Source


@dataclass(slots=True, frozen=True, kw_only=True)
class Standing:
    """How good the model is."""

    source: Source = Source.NONE
    version: int = 0  # of the model
    made_at: float = 0.0  # on the learner's clock
    num_steps: int = 0  # clean ones that were seen
    error_median: float = 0.0  # of the latest clean steps, as shares of the measured time; 0 until there are some
    error_p90: float = 0.0
    drifts: bool = False  # the device is faster or slower than the model says, all the time


def _in_thread(work: Callable[[], None]) -> None:
    def run() -> None:
        with contextlib.suppress(OSError):  # steps go first, if this process may say so; a thread has its own priority
            if sys.platform == "linux":
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        work()

    threading.Thread(target=run, name="learning how long steps take", daemon=True).start()


class Learner:
    """Belongs to the engine's thread. Time comes in, in seconds of a clock that never goes back."""

    def __init__(
        self,
        key: BatchTimeKey,
        model: BatchTime | None,
        source: Source,
        now: float,
        beside: Callable[[Callable[[], None]], None] = _in_thread,
    ) -> None:
        """`model`: what the engine starts with. `beside` runs a fit."""
        self.model = model
        self.standing = Standing(source=source, version=int(model is not None), made_at=now)
        self._key = key
        self._first = model
        self._beside = beside
        self._errors: dict[Regime, deque[float]] = {regime: deque(maxlen=WINDOW) for regime in Regime}
        self._kept: dict[tuple[int, ...], deque[MeasuredStep]] = {}
        self._num_steps = 0  # clean ones
        self._num_new = 0  # clean steps since the last fit
        self._refit_s = REFIT_S
        self._fitted_at = now
        self._is_fitting = False
        self._is_stale = False  # the fit that runs is to steps from before a drift
        self._fitted: BatchTime | None = None  # by the other thread

    @property
    def sure_model(self) -> BatchTime | None:
        """The model, if it is good enough to decide by: not from some quick steps alone."""
        return self.model if self.standing.source in (Source.FILE, Source.LEARNED) else None

    def observe(self, shape: StepShape, seconds: float, now: float, *, is_clean: bool) -> float | None:
        """Takes a step in. Returns what the model said of it: the median, in seconds."""
        if self._fitted is not None:
            self._adopt(self._fitted, now)
        predicted = None if self.model is None else self.model.seconds(shape)
        if not is_clean or seconds <= 0:
            return predicted
        if predicted:
            self._errors[shape.regime].append(math.log(seconds / predicted))
        size = _size(shape)
        if (kept := self._kept.get(size)) is None:
            kept = self._kept[size] = deque(maxlen=KEPT_OF_SIZE)
        kept.append(MeasuredStep(shape, seconds))
        self._num_new += 1
        self._num_steps += 1
        if self._num_steps % LOOK_EVERY == 0:
            self.standing = replace(self.standing, num_steps=self._num_steps)
            self._look(now)
        return predicted

    # ------------------------------------------------------------------------------------------ internals

    def _look(self, now: float) -> None:
        """Looks at the latest errors: tells them, notices drift, widens quantiles, and begins a fit if one is due."""
        errors = [error for ones in self._errors.values() for error in ones]
        if errors:
            sizes = sorted(abs(math.expm1(-error)) for error in errors)
            median, p90 = sizes[len(sizes) // 2], sizes[int(0.9 * (len(sizes) - 1))]
            self.standing = replace(self.standing, error_median=median, error_p90=p90)
            self._note_drift()
            self._widen()
        due = self._fitted_at + (REFIT_S if self.standing.drifts or self.model is None else self._refit_s)
        if not self._is_fitting and self._num_new >= MIN_STEPS and (now >= due or self.model is None):
            self._is_fitting, self._is_stale, self._num_new, self._fitted_at = True, False, 0, now
            steps = [step for kept in self._kept.values() for step in kept]
            steps += self._filled(steps)
            try:
                self._beside(lambda: self._fit(steps))
            except RuntimeError as error:  # no thread can be started
                log.warning("nothing is learned of the steps for now", extra={"reason": str(error)})
                self._is_fitting = False

    def _note_drift(self) -> None:
        offs = {regime: _middle(ones) for regime, ones in self._errors.items() if len(ones) >= LOOK_EVERY}
        worst = max(offs.values(), key=abs, default=0.0)
        drifts = abs(worst) > (0.7 * DRIFT if self.standing.drifts else DRIFT)
        if drifts == self.standing.drifts:
            return
        self.standing = replace(self.standing, drifts=drifts)
        if drifts:
            self._kept.clear()  # those from before say nothing of how it is now
            self._num_new, self._is_stale = 0, self._is_fitting
            log.warning(
                "steps take other times than the model of time says; learning anew",
                extra={"source": str(self.standing.source), "times": round(math.exp(worst), 2)},
            )
        else:
            log.info("steps take the times that the model says again", extra={"source": str(self.standing.source)})

    def _wide_enough(self, model: BatchTime) -> BatchTime:
        """With the quantiles of the real steps that it was fitted to, without those that fill it up."""
        errors: dict[Regime, deque[float]] = {regime: deque() for regime in Regime}
        for kept in self._kept.values():
            for step in kept:
                errors[step.shape.regime].append(math.log(step.seconds / model.seconds(step.shape)))
        regimes = {
            name: _at_least(model.regimes[name], ones) if ones else model.regimes[name] for name, ones in errors.items()
        }
        return replace(model, regimes=regimes)

    def _widen(self) -> None:
        """Quantiles are at least those of the errors that were seen."""
        if (model := self.model) is None:
            return
        regimes = dict(model.regimes)
        for regime, errors in self._errors.items():
            if len(errors) >= LOOK_EVERY:
                regimes[regime] = _at_least(regimes[regime], errors)
        if any(regimes[regime] is not model.regimes[regime] for regime in regimes):
            self.model = replace(model, regimes=regimes)
            if any(regimes[one].p90 > 1.5 * model.regimes[one].p90 for one in regimes):  # enough for others to hear
                self.standing = replace(self.standing, version=self.standing.version + 1)

    def _filled(self, steps: list[MeasuredStep]) -> list[MeasuredStep]:
        """Steps of sizes that were not seen, as the first model says, at the present speed."""
        if (first := self._first) is None:
            return []
        ratios = [math.log(step.seconds / first.seconds(step.shape)) for step in steps]
        speed = math.exp(_middle(ratios)) if ratios else 1.0
        missing = (shape for shape in ANCHORS if _size(shape) not in self._kept)
        return [MeasuredStep(shape, first.seconds(shape) * speed) for shape in missing]

    def _fit(self, steps: list[MeasuredStep]) -> None:
        """In another thread."""
        try:
            self._fitted = fit(self._key, steps)
        except Exception:  # the steps go on with the model that is there
            log.exception("no model of time could be fitted", extra={"num_steps": len(steps)})
            self._is_fitting = False

    def _adopt(self, model: BatchTime, now: float) -> None:
        self._fitted, self._is_fitting = None, False
        if self._is_stale:
            return
        before = self.standing
        was_good = before.error_median <= GOOD_ERROR and not before.drifts and self.model is not None
        self._refit_s = min(2 * self._refit_s, MAX_REFIT_S) if was_good else REFIT_S
        is_rough = before.source in (Source.QUICK, Source.NONE) and self._num_steps < TRUSTED_STEPS
        self.model = self._wide_enough(model)
        for errors in self._errors.values():
            errors.clear()  # what is told from now on is of steps that the model was not fitted to
        source = Source.QUICK if is_rough else Source.LEARNED
        self.standing = replace(self.standing, source=source, version=before.version + 1, made_at=now)


def _size(shape: StepShape) -> tuple[int, ...]:
    """Steps of one size take about the same time."""
    return (
        shape.num_decodes.bit_length(),
        shape.chunk_tokens.bit_length(),
        (shape.decode_context + shape.chunk_pairs).bit_length(),
        shape.num_drawn > 0,
        shape.num_edited + shape.num_masked + shape.num_logprobs > 0,
    )


def _middle(values: deque[float] | list[float]) -> float:
    return sorted(values)[len(values) // 2]


def _at_least(regime: RegimeTime, errors: deque[float]) -> RegimeTime:
    ordered = sorted(errors)
    p90, p99 = ordered[int(0.9 * (len(ordered) - 1))], ordered[int(0.99 * (len(ordered) - 1))]
    if p90 <= regime.p90 and p99 <= regime.p99:
        return regime
    p90 = max(p90, regime.p90)
    return replace(regime, p90=p90, p99=max(p99, p90, regime.p99))


def _shape(decodes: tuple[int, int] = (0, 0), chunk: tuple[int, int] = (0, 0)) -> StepShape:
    (num, context), (new, past) = decodes, chunk
    beside = StepShape(num_decodes=num, decode_context=num * context, longest_context=context, num_head_rows=num)
    return chunk_shape(new, past, beside) if new else beside


_DECODES = [(num, context) for num in (1, 2, 4, 8, 16, 32, 64) for context in (48, 768, 6144)]
_CHUNKS = [(new, past) for new in (12, 48, 192, 384, 768) for past in (0, 384, 3072)]
ANCHORS: tuple[StepShape, ...] = (
    *(_shape(decodes) for decodes in _DECODES),
    *(_shape(chunk=chunk) for chunk in _CHUNKS),
    *(_shape(decodes, chunk) for decodes in ((2, 384), (12, 384), (48, 384)) for chunk in _CHUNKS[:12]),
)
"""Of all sizes that are common."""
