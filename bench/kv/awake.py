"""Keeps the cores of a machine from idling while milliseconds are measured.

A virtual machine that leaves a core idle for a while may find it slow afterwards: here every second decode step that
follows half a second of silence takes 10 ms longer than the others (35 ms), whatever runs it. Between the first and
the second token of a lone request lies just such a silence of the decode worker. So idle cores poll, as latency
profiles of servers have it: https://docs.kernel.org/power/pm_qos_interface.html
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterator

_CPU_LATENCY = "/dev/cpu_dma_latency"


@contextlib.contextmanager
def awake_cores() -> Iterator[None]:
    """Needs Linux, and root; does nothing elsewhere."""
    try:
        device = os.open(_CPU_LATENCY, os.O_WRONLY)
    except OSError:
        yield
        return
    try:
        os.write(device, struct.pack("i", 0))  # microseconds until a core is awake; counts until the file is closed
        yield
    finally:
        os.close(device)
