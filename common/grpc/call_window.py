"""The limits that both ends of a `DecodeMany` stream keep. Routers and workers count in the same way how much of a call
is on its way."""

from __future__ import annotations

WINDOW_BYTES = 2**16
"""What a call may send before its router gives it credit. An event counts with its size, and the one that exceeds the
window is still sent."""

TOKEN_COST = 32
"""Bytes that a token without an event of its own counts: about what an end that keeps it takes for it."""

MAX_TOKENS = 2**13
"""Without events of their own, in one message: others are not held up for long."""

MAX_EVENTS = 2**16
"""In one message. An end may be empty, so their bytes alone would not bound them."""

STARTS_KEY = "baton-many-starts"
"""In the initial metadata of a worker that takes several calls' starts in one message."""
