"""How this process keeps the memory that it gives back."""

from __future__ import annotations

import ctypes
import sys

_M_ARENA_MAX = -8  # of malloc.h
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
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, NUM_ARENAS)
