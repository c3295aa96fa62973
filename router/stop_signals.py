"""SIGTERM and SIGINT as an event, for processes that drain; SIGHUP and SIGUSR1 as calls, for files and log levels."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager


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


def hang_up_signal(look: Callable[[], None]) -> AbstractContextManager[None]:
    """SIGHUP calls `look`; without a handler it would end the process. In other threads than the main one this changes
    nothing."""
    return _calls("SIGHUP", look)


def level_signal(flip: Callable[[], object]) -> AbstractContextManager[None]:
    """The same of SIGUSR1 and `flip`, which changes which log lines are shown."""
    return _calls("SIGUSR1", flip)


@contextlib.contextmanager
def _calls(name: str, act: Callable[[], object]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    number: signal.Signals | None = getattr(signal, name, None)  # Windows has neither
    is_installed = False
    if number is not None:
        with contextlib.suppress(ValueError, RuntimeError, NotImplementedError):
            loop.add_signal_handler(number, act)
            is_installed = True
    try:
        yield
    finally:
        if number is not None and is_installed:
            loop.remove_signal_handler(number)
