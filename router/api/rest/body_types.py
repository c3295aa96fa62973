"""What all bodies of REST requests are made of."""

from __future__ import annotations

import msgspec
from msgspec import Raw, UnsetType

from common.cache_hints import Retain

Given = Raw | UnsetType
"""A value that is looked at and not decoded."""


class Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    pass


class RetainBody(Body, kw_only=True):
    """Asks to keep the prompt's KV for a while."""

    seconds: float
    num_tokens: int | None = None

    def value(self) -> Retain:
        return Retain(self.seconds, self.num_tokens or 0)
