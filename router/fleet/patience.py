"""How long a router waits for what it hears of its workers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, frozen=True, kw_only=True)
class Patience:
    """In seconds."""

    silence_s: float = 5.0  # workers and routers report at least once a second
    model_s: float = 5.0  # a worker that learns new times again and again is asked for them at most this often
    block_retry_s: float = 1.0  # until a stream of blocks that broke is begun anew
    reconnect_wait_s: float = 2.0  # a request waits this long for workers that were there a moment ago
    lost_lately_s: float = 3.0  # what "a moment ago" is, counted from when the loss was noticed


PATIENCE = Patience()
