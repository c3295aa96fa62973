"""How this process keeps the memory that it gives back."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # of malloc.h
_MOST_KEPT = 32 << 20  # the largest piece that glibc keeps for the next one, once it has freed one as large
_FREED_AT_ONCE = 1 << 20
NUM_ARENAS = 2


def give_back_freed() -> None:
    """Gives freed memory back to the system. glibc keeps what lies between pieces in use, if it is up to 32 MiB."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if malloc_trim is not None:
        malloc_trim(0)


def keep_few_arenas() -> None:
    """Limits glibc to two arenas. By default glibc opens an arena for each thread, up to eight a core, and each arena
    keeps what its largest burst took. Only a few threads of a front allocate at a time, so two are enough. Other C
    libraries have no such setting."""
    _mallopt(_M_ARENA_MAX, NUM_ARENAS)


@contextmanager
def freeing_at_once() -> Iterator[None]:
    """Meanwhile pieces of 1 MiB or more go back to the system as they are freed, for code that makes large ones of many
    others: pieces that stay would lie between those that went. Afterwards the limits are those that glibc itself comes
    to, which are good for tensors of a step."""
    _mallopt(_M_MMAP_THRESHOLD, _FREED_AT_ONCE)
    try:
        yield
    finally:
        _mallopt(_M_MMAP_THRESHOLD, _MOST_KEPT)
        _mallopt(_M_TRIM_THRESHOLD, 2 * _MOST_KEPT)


def _mallopt(option: int, value: int) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(option, value)
