"""How often Python looks for garbage that is not gone by itself: objects that hold each other.

By Python's defaults it looks after each 700 objects that were made and not freed, those of requests in flight included,
and at those that it has seen twice only once they are a quarter of all, of which a server's modules are most.
What a request of ours leaves is freed at once (`tests/router/test_garbage.py`); gRPC leaves some objects for each call,
and errors hold their frames. So it is enough to look rarely, and needs little time if modules are left out: then it may
look at all others each few times, and what was in flight during one look does not stay for hours.
"""

from __future__ import annotations

import gc

YOUNG_OBJECTS = 5_000  # made and not freed since the last look
LOOKS_BETWEEN = 1  # each second look is at those that were seen once, too, and each second of these is at all


def look_rarely() -> None:
    """To be called once a process has started: what it has loaded is there to stay, and is not looked at any more."""
    gc.collect()
    gc.freeze()
    gc.collect()  # of what is left: until then, Python takes all that it has frozen for objects it may have to look at
    gc.set_threshold(YOUNG_OBJECTS, LOOKS_BETWEEN, LOOKS_BETWEEN)
