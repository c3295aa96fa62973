"""How often Python looks for garbage that reference counting does not free: objects that refer to each other.

By default Python looks each time that 700 more objects were made than freed, and objects of requests in flight count.
It looks at objects that it has seen twice only if they are a quarter of all objects, most of which belong to a server's
modules. What a request of ours leaves is freed at once (`tests/router/test_garbage.py`); gRPC leaves some objects for
each call, and errors hold their frames. So looking rarely is enough. A look takes little time if modules are left out,
so every few looks cover all other objects, and what was in flight during one look does not stay for hours.
"""

from __future__ import annotations

import gc

YOUNG_OBJECTS = 5_000  # made and not freed since the last look
LOOKS_BETWEEN = 1  # each second look is at those that were seen once, too, and each second of these is at all


def look_rarely() -> None:
    """Call this once a process has started: what it has loaded stays, and is not looked at any more."""
    gc.collect()
    gc.freeze()
    gc.collect()  # of what is left: until then, Python takes all that it has frozen for objects it may have to look at
    gc.set_threshold(YOUNG_OBJECTS, LOOKS_BETWEEN, LOOKS_BETWEEN)
