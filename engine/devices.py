"""The kinds of devices that an engine's process may have.

What a real device needs is imported here, and only if the engine has one. Nothing else that the process imports needs
torch, so a simulated device's process has none, and many fit into one machine
(`tests/engine/simulated/test_no_torch.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from common.config import EngineSettings
from common.errors import ConfigError
from engine.learning.learner import KnownTimes, Source
from engine.local.device_choice import SIMULATED
from engine.simulated.device import SimulatedDevice

if TYPE_CHECKING:
    from engine.hosts.device import HostsDevice
    from engine.local.device import LocalDevice
    from engine.ranks.device import RankedDevice
    from engine.speculation.speculation import Drafter


def open_device(
    model_dir: Path, settings: EngineSettings
) -> LocalDevice | RankedDevice | HostsDevice | SimulatedDevice:
    """The device that `settings` name, with the model loaded. It is warmed up next. Raises `StartupError`, and
    `ConfigError` for settings that do not go together."""
    if settings.expert_parallel_size > 1 and settings.tensor_parallel_size * settings.data_parallel_size == 1:
        raise ConfigError(
            "--expert-parallel-size", "needs as many processes: set --tensor-parallel-size or --data-parallel-size, too"
        )
    if settings.device == SIMULATED:
        if settings.num_ranks > 1:
            raise ConfigError(settings.flag_of_ranks, "a simulated device takes the time that --simulated-time says")
        return SimulatedDevice(model_dir, settings)
    if settings.num_hosts > 1:
        from engine.hosts.device import HostsDevice

        return HostsDevice(model_dir, settings)
    if settings.num_ranks > 1:
        from engine.ranks.device import RankedDevice

        return RankedDevice(model_dir, settings)
    from engine.local.device import LocalDevice

    return LocalDevice(model_dir, settings)


def known_times(
    device: LocalDevice | RankedDevice | HostsDevice | SimulatedDevice, settings: EngineSettings
) -> KnownTimes:
    """How long the device's steps take, as far as that is known without serving. May compute some steps."""
    if isinstance(device, SimulatedDevice):
        return KnownTimes(device.time.key, device.time, Source.FILE)
    from engine.learning.local_times import local_times

    return local_times(device, settings)


def load_drafter(
    device: LocalDevice | RankedDevice | HostsDevice | SimulatedDevice, settings: EngineSettings
) -> Drafter | None:
    """The model or the heads that guess tokens, if `settings` name some. Raises `StartupError`."""
    if isinstance(device, SimulatedDevice):  # it refuses such settings
        return None
    from engine.local import drafter

    return drafter.load_drafter(settings, device)
