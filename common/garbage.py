"""How often Python looks for garbage that is not gone by itself: objects that hold each other.

By Python's defaults it looks after each 700 objects that were made and not freed, those of requests in flight included.
What a request leaves is freed at once (`tests/router/test_garbage.py`), so it is enough to look rarely.
"""

from __future__ import annotations

import gc

YOUNG_OBJECTS = 20_000  # made and not freed since the last look


def look_rarely() -> None:
    """To be called once a process has started: what it has loaded is there to stay, and is not looked at any more."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])
