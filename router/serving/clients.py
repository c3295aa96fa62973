"""Whose request it is."""

from __future__ import annotations

import json
from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class ApiClient:
    """Whose key came with a call."""

    name: str
    tenant: str = ""

    def cache_salt(self, given: str) -> str:
        """What separates this client's cached blocks from others': its tenant, then its own salt. As JSON, so that no
        salt spells another tenant."""
        return json.dumps([self.tenant, given]) if self.tenant or given else ""
