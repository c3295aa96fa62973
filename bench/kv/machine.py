"""What the figures were measured on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import time
from pathlib import Path

from bench.kv.results import Json
from common.version import VERSION

_PACKAGES = ("torch", "numpy", "grpcio", "protobuf", "msgspec", "pyzmq", "nixl-cu13", "nixl-cu12", "transformers")


def describe_machine() -> dict[str, Json]:
    return {
        "cpu": cpu_name(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.platform(),
        "python": platform.python_version(),
        "load_average": list(os.getloadavg()),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def versions() -> dict[str, Json]:
    found: dict[str, Json] = {"baton": VERSION}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # not installed: the version is not there to be told
    return found


def cpu_name() -> str:
    """The CPU's name as the kernel has it; the architecture if the kernel has none."""
    try:
        match = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        match = None
    return match[1] if match else platform.machine()
