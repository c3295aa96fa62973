"""Progress of a long load: a bar on a terminal, else a log line now and then."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TextIO, TypeVar

log = logging.getLogger(__name__)

Item = TypeVar("Item")

_WIDTH = 30
_LOG_EVERY_S = 5.0


def with_progress(
    items: Sequence[Item], what: str, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
) -> Iterator[Item]:
    """Yields `items`, and says after each how many are done. `stream` is standard error if None."""
    stream = stream or sys.stderr
    is_terminal = stream.isatty()
    logged = clock()
    for done, item in enumerate(items):
        yield item
        done += 1
        if is_terminal:
            bar = "#" * (_WIDTH * done // len(items))
            stream.write(f"\r{what} [{bar:{_WIDTH}}] {done}/{len(items)}" + ("\n" if done == len(items) else ""))
            stream.flush()
        elif clock() - logged >= _LOG_EVERY_S or (done == len(items) and clock() > logged):
            logged = clock()
            log.info(what, extra={"done": done, "of": len(items)})
