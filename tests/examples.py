"""How many examples a property is tried with: all of them in `make test-slow`, a quarter in `make test`.

Of a property that says nothing (`@given` alone), hypothesis' profile decides; see `tests/conftest.py`.
"""

from __future__ import annotations

from hypothesis import settings

QUICK, THOROUGH = 25, 100


def examples(num: int) -> int:
    """What the profile leaves of `num`, for `settings(max_examples=…)`."""
    return max(1, num * settings().max_examples // THOROUGH)
