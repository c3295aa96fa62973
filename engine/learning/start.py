"""What an engine knows of its steps' times when it starts, and how it goes on to learn."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from common.batch_time import BatchTime, BatchTimeKey
from common.batch_time_file import load
from common.config import EngineSettings
from common.errors import ConfigError, StartupError
from engine.learning.key import key_of, model_file
from engine.learning.learner import Learner, Source
from engine.learning.observed_device import ObservedDevice
from engine.learning.quick import quick_model
from engine.learning.step_trace import StepTrace
from engine.local.device import LocalDevice
from engine.simulated.device import SimulatedDevice

log = logging.getLogger(__name__)


def start_learning(
    device: LocalDevice | SimulatedDevice, settings: EngineSettings, step_trace: str = ""
) -> tuple[ObservedDevice, Learner]:
    """The device that is learned from, and who learns. To be called before the first request, after `warm_up`.

    `step_trace` names a file for a trace of steps. Raises `ConfigError` if it cannot be written.
    """
    model: BatchTime | None
    if isinstance(device, SimulatedDevice):
        key, model, source = device.time.key, device.time, Source.FILE
    else:
        key = key_of(device, settings)
        model, source = _kept_model(settings.cache_dir, key), Source.FILE
        if model is None:
            model = quick_model(device, key, settings)
            source = Source.NONE if model is None else Source.QUICK
    log.info("times of steps", extra={"source": str(source)})
    learner = Learner(key, model, source, time.monotonic())
    try:
        trace = StepTrace(Path(step_trace), key) if step_trace else None
    except OSError as error:
        raise ConfigError("--step-trace", f"{step_trace} cannot be written: {error.strerror}") from error
    return ObservedDevice(device, learner, trace), learner


def _kept_model(cache_dir: str, key: BatchTimeKey) -> BatchTime | None:
    """What `baton profile` kept for this. A file that is of no use is named and left alone: the engine learns anew."""
    path = model_file(cache_dir, key)
    if not path.exists():
        return None
    try:
        return load(path, key)
    except StartupError as error:
        log.warning("the model of time is not used", extra={"reason": error.message})
        return None
