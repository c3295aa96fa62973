"""What an engine knows of its steps' times when it starts, and how it goes on to learn."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING

from common.config import EngineSettings
from common.errors import ConfigError
from engine.devices import known_times
from engine.learning.learner import Learner
from engine.learning.observed_device import ObservedDevice
from engine.learning.step_trace import StepTrace

if TYPE_CHECKING:
    from engine.hosts.device import HostsDevice
    from engine.local.device import LocalDevice
    from engine.ranks.device import RankedDevice
    from engine.simulated.device import SimulatedDevice

log = logging.getLogger(__name__)


def start_learning(
    device: LocalDevice | RankedDevice | HostsDevice | SimulatedDevice, settings: EngineSettings, step_trace: str = ""
) -> tuple[ObservedDevice, Learner]:
    """The device that is learned from, and who learns. To be called before the first request, after `warm_up`.

    `step_trace` names a file for a trace of steps. Raises `ConfigError` if it cannot be written.
    """
    known = known_times(device, settings)
    log.info("times of steps", extra={"source": str(known.source)})
    learner = Learner(known.key, known.model, known.source, time.monotonic())
    try:
        trace = StepTrace(Path(step_trace), known.key) if step_trace else None
    except OSError as error:
        raise ConfigError("--step-trace", f"{step_trace} cannot be written: {error.strerror}") from error
    return ObservedDevice(device, learner, trace), learner
