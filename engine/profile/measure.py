"""Runs the steps of a profile on a device."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from common.batch_time import StepShape
from common.batch_time_fit import MeasuredStep
from common.config import EngineSettings
from common.sampling import SamplingParams
from engine import messages as m
from engine.blocks.host_tier import BlockCopy
from engine.core import EngineCore
from engine.device import Device, KVPlane, Ticket, do_nothing
from engine.profile.design import Limits, Point, edges, random_points, reference_point, rows_of
from engine.step import StepInput, StepOutput
from kv_store.base import ConnectorConfig
from kv_store.memory import MemoryConnector

REFERENCE_EVERY = 20  # points
NUM_REPEATS = 3  # of a point, one after the other; the median counts
WORKLOAD_REQUESTS = 16  # that run at once


class TimedDevice(Device):
    """Does what `device` does, and keeps shape and time of each step."""

    def __init__(self, device: Device) -> None:
        self.info = device.info
        self.steps: list[MeasuredStep] = []
        self._device = device
        self._shapes: dict[int, StepShape] = {}

    def begin(self, step: StepInput) -> Ticket:
        self._shapes[step.number] = step.shape
        return self._device.begin(step)

    def end(self, ticket: Ticket, meanwhile: Callable[[], None] = do_nothing) -> StepOutput:
        output = self._device.end(ticket, meanwhile)
        shape = self._shapes.pop(ticket.number)
        if not output.failures:
            self.steps.append(MeasuredStep(shape, output.elapsed_s))
        return output

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        self._device.copy(copies)

    def planes(self) -> list[KVPlane]:
        return self._device.planes()


class Run:
    """One run of measurements: edges first if `with_edges`, then random points, in random order, until time is up."""

    def __init__(self, device: Device, limits: Limits, *, seed: int, with_edges: bool) -> None:
        self._device = device
        self._limits = limits
        self._rng = random.Random(seed)  # noqa: S311 (no secret)
        points: list[Point] = list(edges(limits)) if with_edges else []
        self._rng.shuffle(points)
        self._points = _chain(points, random_points(limits, self._rng))
        self._reference = reference_point(limits)
        self.references: list[float] = []  # seconds of the reference step, as often as it was measured

    def measure(self, seconds: float, progress: Callable[[float], None]) -> list[MeasuredStep]:
        """Steps with their times, as if the machine had been as fast as in its median moment."""
        start = time.monotonic()
        groups: list[tuple[float, list[MeasuredStep]]] = []  # each with what the reference took around it
        before = self._time_reference()
        while (passed := time.monotonic() - start) < seconds:
            group = []
            for _ in range(REFERENCE_EVERY):
                if time.monotonic() - start < seconds:
                    group.append(self._measure(next(self._points)))
            after = self._time_reference()
            groups.append(((before + after) / 2, group))
            before = after
            progress(min(1.0, passed / seconds))
        middle = statistics.median(self.references)
        progress(1.0)
        return [
            MeasuredStep(step.shape, step.seconds * middle / reference) for reference, group in groups for step in group
        ]

    def noise(self, num_points: int = 12) -> float:
        """The relative error that a perfect model would still have: half of the difference of two measurements of a
        point, the median of some points."""
        points = [next(self._points) for _ in range(num_points)]
        first = [self._measure(point).seconds for point in points]
        second = [self._measure(point).seconds for point in points]
        return statistics.median(abs(a - b) / (a + b) for a, b in zip(first, second, strict=True))

    def _time_reference(self) -> float:
        seconds = self._measure(self._reference).seconds
        self.references.append(seconds)
        return seconds

    def _measure(self, point: Point) -> MeasuredStep:
        rows = rows_of(point, self._limits, self._rng)
        step = StepInput(number=0, rows=rows)
        times = [self._device.compute(rows).elapsed_s for _ in range(NUM_REPEATS)]
        return MeasuredStep(step.shape, statistics.median(times))


def measure_workload(device: Device, settings: EngineSettings, *, seconds: float, seed: int) -> list[MeasuredStep]:
    """Steps of the engine itself, with its scheduler: conversations of other lengths than a profile's points, some of
    which share a beginning. Their times are of single steps, so they are noisier than a run's."""
    timed = TimedDevice(device)
    rng = random.Random(seed)  # noqa: S311 (no secret)
    info = device.info
    connector = MemoryConnector(ConnectorConfig(epoch="profile", worker_id="profile"))
    core = EngineCore(settings, timed, connector, time.monotonic, lambda: None)
    shared = [rng.randrange(info.vocab_size) for _ in range(min(96, info.max_model_len // 4))]
    number = 0
    end = time.monotonic() + seconds
    while (is_over := time.monotonic() >= end) is False or core.has_work:
        while not is_over and len(core.scheduler.requests) < WORKLOAD_REQUESTS:
            number += 1
            core.handle(_request(number, shared, info.max_model_len, info.vocab_size, rng))
        core.step()
        core.take_events()
        for request_id in [] if not is_over else list(core.scheduler.requests):
            core.handle(m.Release(request_id))
    core.close()
    return timed.steps


def _request(number: int, shared: Sequence[int], max_len: int, vocab_size: int, rng: random.Random) -> m.AddRequest:
    num_new = max(1, min(max_len // 3, round(rng.lognormvariate(4.5, 0.9))))
    prompt = [*(shared if rng.random() < 0.3 else ()), *(rng.randrange(vocab_size) for _ in range(num_new))]
    num_answer = max(1, min(max_len // 3, round(rng.lognormvariate(3.5, 0.7))))
    return m.AddRequest(
        request_id=str(number),
        prompt_token_ids=prompt,
        sampling_params=SamplingParams(temperature=0.0, max_tokens=num_answer, ignore_eos=True),
    )


def _chain(first: Iterable[Point], then: Iterator[Point]) -> Iterator[Point]:
    yield from first
    yield from then
