"""Kubernetes label selectors, as they stand in a query: `a=b,c!=d,e in (f,g),h notin (i),j,!k`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from common.errors import InvalidArgumentError

_KEY = r"[A-Za-z0-9]([-A-Za-z0-9_./]*[A-Za-z0-9])?"
_VALUE = r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?"
_EQUALITY = re.compile(rf"(?P<key>{_KEY})\s*(?P<operator>==|=|!=)\s*(?P<value>{_VALUE})")
_SET = re.compile(rf"(?P<key>{_KEY})\s+(?P<operator>in|notin)\s*\((?P<values>[^()]*)\)")
_EXISTS = re.compile(rf"(?P<operator>!?)\s*(?P<key>{_KEY})")
_PARTS = re.compile(r",(?![^(]*\))")  # commas outside of parentheses


@dataclass(slots=True, frozen=True)
class Requirement:
    """`values` None: only whether the key is there. `negated`: satisfied if the label does not match."""

    key: str
    values: frozenset[str] | None
    negated: bool

    def holds(self, labels: Mapping[str, str]) -> bool:
        found = self.key in labels and (self.values is None or labels[self.key] in self.values)
        return found != self.negated


def parse(text: str) -> tuple[Requirement, ...]:
    """Empty selects everything. Raises `InvalidArgumentError` naming `labelSelector`."""
    return tuple(_requirement(part.strip()) for part in _PARTS.split(text)) if text.strip() else ()


def _requirement(part: str) -> Requirement:
    if match := _EQUALITY.fullmatch(part):
        return Requirement(match["key"], frozenset({match["value"]}), match["operator"] == "!=")
    if match := _SET.fullmatch(part):
        values = frozenset(value.strip() for value in match["values"].split(","))
        return Requirement(match["key"], values, match["operator"] == "notin")
    if match := _EXISTS.fullmatch(part):
        return Requirement(match["key"], None, match["operator"] == "!")
    raise InvalidArgumentError("labelSelector", f"cannot read {part!r}")
