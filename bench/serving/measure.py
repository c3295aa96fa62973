"""One measurement: warm-up, then the load, as often as it is to be repeated."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from bench.serving.backends import open_endpoint
from bench.serving.endpoint import Target
from bench.serving.figures import Figures, figures, over_repeats
from bench.serving.load import Load, LoadSettings
from bench.serving.outcome import Outcome
from bench.serving.plan import make_load
from bench.serving.run import Progress, run_load
from bench.serving.texts import Texts
from common.goodput import Goodput

WARM_UP_AT_ONCE = 8


@dataclass(slots=True, frozen=True, kw_only=True)
class MeasureSettings:
    load: LoadSettings
    targets: Goodput = field(default_factory=dict)
    num_warmups: int = 0  # requests before the run
    warmup_seconds: float = 0.0  # of the run that do not count
    repeats: int = 1
    request_timeout: float | None = None  # seconds
    max_send_lag_s: float | None = None

    def at_rate(self, rate: float) -> MeasureSettings:
        return replace(self, load=replace(self.load, request_rate=rate))

    def at_concurrency(self, num: int | None) -> MeasureSettings:
        return replace(self, load=replace(self.load, max_concurrency=num))


@dataclass(slots=True, frozen=True)
class Measured:
    model: str
    figures: Figures
    runs: Sequence[Sequence[Outcome]]  # requests of each repeat


Watch = Callable[[str, int], contextlib.AbstractContextManager[Progress]]
"""Given what runs and how many requests it has: a context while it runs, which is told of each that ends."""


@contextlib.contextmanager
def unwatched(what: str, num: int) -> Iterator[Progress]:  # noqa: ARG001
    yield lambda _: None


async def measure(target: Target, settings: MeasureSettings, texts: Texts, watch: Watch = unwatched) -> Measured:
    """Raises `InternalError` if the endpoint does not say which model it serves, and `ConfigError`."""
    endpoint = open_endpoint(target)
    try:
        model = target.model
        if not model:
            model = await endpoint.model()
            endpoint.use_model(model)
        if settings.num_warmups:
            warm_up = _warm_up(settings, texts)
            with watch("warm-up", warm_up.num_requests) as progress:
                warmed = await run_load(warm_up, endpoint, timeout_s=settings.request_timeout, progress=progress)
        made: list[Figures] = []
        runs: list[Sequence[Outcome]] = []
        for repeat in range(settings.repeats):
            load = make_load(settings.load, texts, f"{settings.load.seed + repeat}")
            what = f"run {repeat + 1} of {settings.repeats}" if settings.repeats > 1 else "run"
            with watch(what, load.num_requests) as progress, _few_collections():
                run = await run_load(load, endpoint, timeout_s=settings.request_timeout, progress=progress)
            found = figures(run, settings.targets, warm_up_s=settings.warmup_seconds, max_lag_s=settings.max_send_lag_s)
            if load.offered_rate is not None:
                found["offered_rate"] = load.offered_rate
            made.append(found)
            runs.append(run.outcomes)
        whole = over_repeats(made)
        if settings.num_warmups:
            whole["warmup"] = figures(warmed, {})
        return Measured(model, whole, runs)
    finally:
        await endpoint.close()


@contextlib.contextmanager
def _few_collections() -> Iterator[None]:
    """Garbage collections during a run do not look at what was made before it: they would make the client late."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _warm_up(settings: MeasureSettings, texts: Texts) -> Load:
    """Requests like those of the run, and none of these, a few at a time."""
    num = settings.num_warmups
    at_once = min(num, settings.load.max_concurrency or WARM_UP_AT_ONCE)
    like = replace(
        settings.load,
        num_prompts=num,
        duration=None,
        request_rate=float("inf"),
        ramp_up_strategy=None,
        max_concurrency=at_once,
        cancel_fraction=0.0,
    )
    return make_load(like, texts, f"{settings.load.seed}/warm-up")
