"""What all bodies of REST requests are made of."""

from __future__ import annotations

import msgspec
from msgspec import Raw, UnsetType

Given = Raw | UnsetType
"""A value that is looked at and not decoded."""


class Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    pass
