"""Plain schemas: what both halves of the rewriting speak of.

A plain schema is True, False, or a mapping with some of these keywords, whose values are of the right type:

- `type`, a frozenset of `TYPES`: always there;
- `enum`: JSON values (`const` is an `enum` of one);
- `$ref`: the number of a definition;
- `allOf`, `anyOf`, `oneOf`: lists of plain schemas, and `not`: one. Each of these may come several times, so they are
  parts of `parts`, a list of (keyword, value, place) in the order in which they apply;
- `before`: how many of them stand before `properties`: keys come in the order in which a schema names them;
- all others as JSON schema (2020-12) has them, with plain schemas inside.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# "number" of JSON schema is both kinds of it. Only some schemas tell them apart.
TYPES = frozenset({"null", "boolean", "integer", "fraction", "string", "array", "object"})
NUMBERS = frozenset({"integer", "fraction"})

Plain = Mapping[str, Any] | bool


class UnkeptError(ValueError):
    """A schema that cannot be kept to the letter."""

    def __init__(self, keyword: str, place: str, reason: str) -> None:
        super().__init__(f"{keyword} at {place or '#'}: {reason}")


def type_of(value: object) -> str:
    """Of a JSON value."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "integer" if value.is_integer() else "fraction"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"


def types_of(schema: Plain) -> frozenset[str]:
    if isinstance(schema, bool):
        return TYPES if schema else frozenset()
    types: frozenset[str] = schema.get("type", TYPES)
    return types


def is_same(one: object, other: object) -> bool:
    """Whether two JSON values are equal; in Python, true is 1."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(is_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(is_same(value, other[key]) for key, value in one.items())
    return one == other


def is_equal(one: Any, other: Any) -> bool:
    """Whether two plain schemas, or values of their keywords, say the same in the same words, wherever they stand."""
    if isinstance(one, tuple) and isinstance(other, tuple):  # a part
        return bool(one[0] == other[0] and is_equal(one[1], other[1]))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(is_equal(value, other[key]) for key, value in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(is_equal, one, other))
    return is_same(one, other)


def parts(schema: Plain) -> list[tuple[str, Any, str]]:
    """(`allOf`, `anyOf`, `oneOf`, `not` or `$ref`, its value, its place)"""
    return [] if isinstance(schema, bool) else schema.get("parts", [])


def any_of(schemas: list[Plain]) -> Plain:
    if any(one is True for one in schemas):
        return True
    left = [one for one in schemas if one is not False]
    return left[0] if len(left) == 1 else {"parts": [("anyOf", left, "")]} if left else False


def all_of(schemas: list[Plain]) -> Plain:
    if any(one is False for one in schemas):
        return False
    left = [one for one in schemas if one is not True]
    return left[0] if len(left) == 1 else {"parts": [("allOf", left, "")]} if left else True
