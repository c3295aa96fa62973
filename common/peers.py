"""Makes harmless what other processes of the fleet say. A peer may be of another version, broken, or taken over. An
impossible number must neither end a request by an exception nor spoil sums and metrics for good.
"""

from __future__ import annotations

import math

MAX_COUNT = 2**31 - 1  # of anything: two of them still fit into a uint32
MAX_BYTES = 2**62
MAX_WORDS = 500  # characters of a reason, or of a name
_LONGEST_MS = 1e9


def milliseconds(value: float) -> float:
    """A time that a peer reports, for reports and metrics; 0 if the value is no time."""
    return value if math.isfinite(value) and 0 <= value <= _LONGEST_MS else 0.0


def seconds_to_wait(value: float, *, most: float) -> float:
    """A delay that a peer asks for: in [0, `most`]."""
    return min(max(value, 0.0), most) if math.isfinite(value) else most
