"""Finds which variant of the kernels makes whole steps of a model fastest, and from how many tokens on torch's library.

Lone products decide nothing: what lies between them is computed by the kernels in one go, and by torch in pieces. So
each candidate loads the model as an engine would, and computes the steps that engines compute.
"""

from __future__ import annotations

import math
import random
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.config import EngineSettings
from engine.kernels.choice import AUTO, TORCH
from engine.kernels.table import Rule, Tuned, TunedFor, keep_tuned
from engine.local.device import LocalDevice
from engine.profile.design import Limits, Point, rows_of

_CONTEXT, _MIXED = 128, 256
STEPS = {
    "prefill": Point(chunks=((512, 0),)),
    "mixed": Point(decodes=(_CONTEXT,) * 8, chunks=((_MIXED, 0),)),
    "batch 1": Point(decodes=(_CONTEXT,)),
    "batch 8": Point(decodes=(_CONTEXT,) * 8),
    "batch 32": Point(decodes=(_CONTEXT,) * 32),
}
TORCH_FROM = (32, 128)  # tokens of a step: a decode batch of 32 by torch too, or prompts alone
NOISE = 1.02  # times as long: not slower
GAIN = 1.05  # times as fast in some step, to be worth a table
_REPETITIONS = 7
_LONG_S = 1.5
_HOPELESS = 1.5  # times as long in its first step: a candidate is given up

Seconds = Mapping[str, float]  # of each step, in its best repetition


@dataclass(slots=True, frozen=True)
class Candidate:
    instruction_set: str
    torch_from: int | None = None

    def rules(self, dtype: str) -> tuple[Rule, ...]:
        return (Rule(dtype, 0, self.torch_from),)

    def __str__(self) -> str:
        return self.instruction_set + ("" if self.torch_from is None else f", torch from {self.torch_from} tokens on")


@dataclass(slots=True, frozen=True)
class Found:
    """`seconds` by candidate; None in place of a candidate is what engines do without a table."""

    best: Candidate | None
    seconds: Mapping[Candidate | None, Seconds]


Measure = Callable[[Candidate | None, Seconds | None], Seconds]
"""Seconds of the steps with a candidate. If a step takes hopelessly longer than in the second argument, what was
measured until then."""


def tune(
    variants: Sequence[str], *, has_rules: bool, measure: Measure, progress: Callable[[str, float], None]
) -> Found:
    """`has_rules`: torch's library can multiply in the place of the kernels. `progress` hears what is measured, and the
    share that is done.

    A candidate is taken if in two runs no step is slower than without it, and one is clearly faster."""
    seconds: dict[Candidate | None, Seconds] = {}
    num_runs = len(variants) + (len(TORCH_FROM) if has_rules else 0) + 2
    done = 0

    def run(candidate: Candidate | None, against: Seconds | None = None) -> Seconds:
        nonlocal done
        progress(str(candidate or "as shipped"), done / num_runs)
        done += 1
        return measure(candidate, against)

    seconds[None] = run(None)
    plain = [Candidate(name) for name in variants]
    for candidate in plain:
        seconds[candidate] = run(candidate, seconds[None])
    base = min(plain, key=lambda one: _score(seconds[one], seconds[None]))
    for torch_from in TORCH_FROM if has_rules else ():
        candidate = Candidate(base.instruction_set, torch_from)
        seconds[candidate] = run(candidate, seconds[None])
    better = [one for one in seconds if one is not None and is_better(seconds[one], seconds[None])]
    best = min(better, key=lambda one: _score(seconds[one], seconds[None]), default=None)
    if best is not None:
        num_runs = done + 2
        again = run(None)
        against = {name: min(each, again[name]) for name, each in seconds[None].items()}
        second = run(best, against)
        if not (is_better(second, again) and is_better(seconds[best], against, gain=1.0)):
            best = None
    progress("", 1.0)
    return Found(best, seconds)


def is_better(seconds: Seconds, against: Seconds, gain: float = GAIN) -> bool:
    """Whether no step is slower, and one is `gain` times as fast."""
    if seconds.keys() != against.keys():
        return False
    ratios = [against[name] / each for name, each in seconds.items()]
    return min(ratios) * NOISE >= 1 and max(ratios) >= gain


def _score(seconds: Seconds, against: Seconds) -> float:
    """The smaller, the faster: the mean over steps of the logarithm of how many times as long each takes."""
    if seconds.keys() != against.keys():
        return math.inf
    return math.fsum(math.log(each / against[name]) for name, each in seconds.items()) / len(seconds)


class StepMeasurer:
    """A `Measure` that loads the model anew for each candidate."""

    def __init__(
        self,
        model_dir: Path,
        settings: EngineSettings,
        of: TunedFor,
        steps: Mapping[str, Point] = STEPS,
        long_s: float = _LONG_S,
    ) -> None:
        """`settings.kernels` is auto. A step is not repeated after `long_s` seconds."""
        self._model_dir, self._settings, self._of = model_dir, settings, of
        self._steps, self._long_s = steps, long_s

    def __call__(self, candidate: Candidate | None, against: Seconds | None) -> Seconds:
        with tempfile.TemporaryDirectory() as folder:
            kernels = AUTO if candidate is None else candidate.instruction_set
            if candidate is not None:
                tuned = Tuned(self._of, candidate.instruction_set, candidate.rules(self._of.dtype))
                keep_tuned(folder, self._of, tuned)
            changes = {"kernels": kernels, "cache_dir": folder}
            device = LocalDevice(self._model_dir, self._settings.model_copy(update=changes))
        device.kv_cache.normal_(0, 0.05)  # memory that nobody wrote to is faster to read than any other
        device.warm_up()
        return time_steps(device, against, self._steps, self._long_s)


def time_steps(
    device: LocalDevice, against: Seconds | None, steps: Mapping[str, Point] = STEPS, long_s: float = _LONG_S
) -> Seconds:
    """Those of `steps` that this device has room for."""
    info = device.info
    limits = Limits(info.num_blocks, info.spec.block_size, info.max_model_len, info.vocab_size, 32, 512)
    best: dict[str, float] = {}
    for name, point in steps.items():
        longest = max([*point.decodes, *(new + past for new, past in point.chunks)])
        if longest > limits.max_context or point.num_blocks(limits.block_size) > limits.num_blocks:
            continue
        rows = rows_of(point, limits, random.Random(0))  # noqa: S311 (no secret)
        begin = time.perf_counter()
        for number in range(_REPETITIONS):
            if number and time.perf_counter() - begin > long_s:
                break
            best[name] = min(best.get(name, math.inf), device.compute(rows).elapsed_s)
        if against is not None and name in against and best[name] > _HOPELESS * against[name]:
            break
    return best


def num_blocks(block_size: int) -> int:
    """Of the KV cache, for all of `STEPS`."""
    return max(point.num_blocks(block_size) for point in STEPS.values()) + 1


def possible_variants(possible: Sequence[str]) -> list[str]:
    """Those worth a run: the three that have the most."""
    return [name for name in possible if name != TORCH][-3:]
