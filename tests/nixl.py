"""Whether NIXL is here. Looked for, not imported: what importing it does to logging is the connector's business."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from kv_store.nixl.agent import MODULES

HAS_NIXL = any(find_spec(name) for name in MODULES)
WHY_NOT = "NIXL is not installed (extra 'nixl')"

needs_nixl = pytest.mark.skipif(not HAS_NIXL, reason=WHY_NOT)


def skip_without_nixl(connector: str) -> None:
    """For fixtures: skips what uses `connector` if that is nixl and cannot be had."""
    if connector == "nixl" and not HAS_NIXL:
        pytest.skip(WHY_NOT)
