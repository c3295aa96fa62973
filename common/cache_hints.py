"""What a request asks of caches, checked in one place for gRPC, REST and workers."""

from __future__ import annotations

import math
from dataclasses import dataclass

from common.errors import InvalidArgumentError

MAX_TOKENS = 2**31 - 1  # what the field holds
MAX_RETAIN_S = 7 * 24 * 3600.0  # whatever a router allows


@dataclass(slots=True, frozen=True)
class Retain:
    """Have the KV blocks of a prompt evicted after others, for so long after the request's end."""

    seconds: float
    num_tokens: int = 0  # of so many of the prompt's first tokens; 0: of all


def check_retain(retain: Retain, max_seconds: float, name: str = "retain") -> None:
    """Raises `InvalidArgumentError`. `name` is the client's."""
    check_retain_s(retain.seconds, max_seconds, f"{name}.seconds")
    check_num_tokens(retain.num_tokens, f"{name}.num_tokens")


def check_retain_s(seconds: float, max_seconds: float, name: str) -> None:
    """Raises `InvalidArgumentError`."""
    if not (math.isfinite(seconds) and 0 < seconds <= max_seconds):
        most = f"in (0, {max_seconds:g}]" if max_seconds else "unset: this router retains nothing (--max-retain)"
        raise InvalidArgumentError(name, f"must be {most}, not {seconds:g}")


def check_num_tokens(num_tokens: int, name: str) -> None:
    """Checks how many of a prompt's first tokens are meant; 0: all. Raises `InvalidArgumentError`."""
    if not 0 <= num_tokens <= MAX_TOKENS:
        raise InvalidArgumentError(name, f"must be in [0, {MAX_TOKENS}], not {num_tokens}")
