"""What `--device auto` means: a CUDA device if there is one that torch can use, else the CPU.

torch is loaded only if the driver has a device, so that `baton up` on a machine without one starts in a moment.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from dataclasses import dataclass

AUTO = "auto"
SIMULATED = "simulated"
_DRIVER = "libcuda.so.1"

log = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class DeviceChoice:
    device: str  # "cpu", "cuda" or "cuda:N"; as it was asked for, if it was, and not checked
    reason: str  # for people: log lines and `baton status`
    is_cuda_unusable: bool = False  # there is a CUDA device, and torch cannot use it


def num_driver_devices() -> int:
    """CUDA devices that the driver shows to this process; 0 without a driver."""
    count = ctypes.c_int(0)
    try:
        driver = ctypes.CDLL(_DRIVER)
    except OSError:
        return 0
    failed = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    return 0 if failed else count.value


def torch_problem() -> str:
    """Why torch cannot use the CUDA device that the driver has; empty if it can."""
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA"
    return "" if torch.cuda.is_available() else f"torch {torch.__version__} cannot use it: its driver may be too old"


def has_driver() -> bool:
    """Whether CUDA's driver is installed. Initialises nothing."""
    try:
        ctypes.CDLL(_DRIVER)
    except OSError:
        return False
    return True


def choose_device(
    asked: str,
    num_devices: Callable[[], int] = num_driver_devices,
    problem: Callable[[], str] = torch_problem,
    driver: Callable[[], bool] = has_driver,
) -> DeviceChoice:
    """`asked` is --device. If a device was asked for, it is taken, and the reason names auto's choice if that differs.
    So a device that one process chose for all others keeps its reason. With cpu no device is looked for: that would
    initialise CUDA."""
    if asked == SIMULATED:
        return DeviceChoice(SIMULATED, "as set")
    if asked == "cpu":
        return DeviceChoice("cpu", "as set" if driver() else "there is no CUDA device")
    auto = _auto(num_devices, problem)
    if asked in (AUTO, auto.device):
        return auto
    return DeviceChoice(asked, f"as set; auto would be {auto.device}: {auto.reason}", auto.is_cuda_unusable)


def _auto(num_devices: Callable[[], int], problem: Callable[[], str]) -> DeviceChoice:
    if not num_devices():
        return DeviceChoice("cpu", "there is no CUDA device")
    if why := problem():
        log.warning("the CUDA device stays unused", extra={"reason": why})
        return DeviceChoice("cpu", f"there is a CUDA device, but {why}", is_cuda_unusable=True)
    return DeviceChoice("cuda", "there is a CUDA device")
