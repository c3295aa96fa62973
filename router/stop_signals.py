"""SIGTERM and SIGINT as an event, for processes that drain; SIGHUP as a call, for those that read files again."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def stop_signals(stop: asyncio.Event) -> Iterator[None]:
    """SIGTERM and SIGINT set `stop`. In other threads than the main one this changes nothing."""
    loop = asyncio.get_running_loop()
    installed = []
    for number in (signal.SIGTERM, signal.SIGINT):
        with contextlib.suppress(ValueError, RuntimeError, NotImplementedError):
            loop.add_signal_handler(number, stop.set)
            installed.append(number)
    try:
        yield
    finally:
        for number in installed:
            loop.remove_signal_handler(number)


@contextlib.contextmanager
def hang_up_signal(look: Callable[[], None]) -> Iterator[None]:
    """SIGHUP calls `look`; without a handler it would end the process. In other threads than the main one this changes
    nothing."""
    loop = asyncio.get_running_loop()
    is_installed = False
    if hasattr(signal, "SIGHUP"):
        with contextlib.suppress(ValueError, RuntimeError, NotImplementedError):
            loop.add_signal_handler(signal.SIGHUP, look)
            is_installed = True
    try:
        yield
    finally:
        if is_installed:
            loop.remove_signal_handler(signal.SIGHUP)
