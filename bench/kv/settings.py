"""What a run is asked to do."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

from common.config import DEFAULT_MODEL

QUICK_SETTLE_S = 1.0  # a quick run shows that everything works; what it measures may be disturbed

Progress = Callable[[str], None]


@dataclass(slots=True, frozen=True, kw_only=True)
class BenchSettings:
    """`quick` is the same with few lengths and repeats: it shows that everything works, and roughly how well."""

    model: str = DEFAULT_MODEL
    dtype: str
    cache_dir: str
    connectors: tuple[str, ...] = ("nixl", "shared_storage", "lmcache")
    repeats: int = 5
    seed: int = 1
    quick: bool = False


def show_progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
