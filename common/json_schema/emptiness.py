"""Whether nothing can match several plain schemas at once, if that is easy to prove. False where it is not known."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from common.json_schema.patterns import UnreadError, has_match
from common.json_schema.plain import TYPES, Plain, is_same, parts, type_of, types_of

MAX_TERMS = 64
MAX_DEPTH = 6
MAX_REFERENCES = 12
MAX_PATTERNS = 500  # characters of patterns that are compared

# Formats that patterns say.
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HEX = "[0-9A-Fa-f]"
_FORMATS = {
    "ipv4": rf"^(?:{_BYTE}\.){{3}}{_BYTE}$",
    "hostname": rf"^{_LABEL}(?:\.{_LABEL})*$",
    "uuid": f"^{_HEX}{{8}}-(?:{_HEX}{{4}}-){{3}}{_HEX}{{12}}$",
}

Term = list[Mapping[str, Any]]  # schemas without parts, all of which hold


def is_empty(schemas: Sequence[Plain], definitions: Mapping[int, Plain], depth: int = 0) -> bool:
    terms: list[Term] = [[]]
    for schema in schemas:
        terms = _product(terms, _terms(schema, definitions, 0))
    return all(_nothing(term, definitions, depth) for term in terms)


def _terms(schema: Plain, definitions: Mapping[int, Plain], num_references: int) -> list[Term]:
    """Something matches one of them if it matches `schema`: the reverse need not hold."""
    if isinstance(schema, bool):
        return [[]] if schema else []
    found: list[Term] = [[schema]]
    for kind, value, _ in parts(schema):
        match kind:
            case "$ref" if num_references < MAX_REFERENCES:
                found = _product(found, _terms(definitions.get(value, True), definitions, num_references + 1))
            case "allOf":
                for one in value:
                    found = _product(found, _terms(one, definitions, num_references))
            case "anyOf" | "oneOf":
                either = [term for one in value for term in _terms(one, definitions, num_references)]
                found = _product(found, either)
    return found


def _product(some: list[Term], others: list[Term]) -> list[Term]:
    if len(some) * len(others) > MAX_TERMS:
        return some
    return [one + other for one in some for other in others]


def _nothing(term: Term, definitions: Mapping[int, Plain], depth: int) -> bool:
    types = TYPES.intersection(*(types_of(one) for one in term))
    enums = [one["enum"] for one in term if "enum" in one]
    if enums:
        left = [
            value
            for value in enums[0]
            if type_of(value) in types and all(any(is_same(value, other) for other in enum) for enum in enums[1:])
        ]
        return all(any(_refuses(one, value) for one in term) for value in left)
    return all(_no(kind, term, definitions, depth) for kind in types)


def _no(kind: str, term: Term, definitions: Mapping[int, Plain], depth: int) -> bool:
    match kind:
        case "integer" | "fraction":
            return _is_outside(term)
        case "string":
            return _is_crossed(term, "minLength", "maxLength") or _clash(term)
        case "array":
            return _is_crossed(term, "minItems", "maxItems") or (
                depth < MAX_DEPTH and _has_empty_item(term, definitions, depth)
            )
        case "object":
            return _is_crossed(term, "minProperties", "maxProperties") or (
                depth < MAX_DEPTH and _has_empty_property(term, definitions, depth)
            )
    return False


def _is_crossed(term: Term, low: str, high: str) -> bool:
    lowest = max((one[low] for one in term if low in one), default=0)
    return any(one[high] < lowest for one in term if high in one)


def _is_outside(term: Term) -> bool:
    lows = [(one[key], key[0] == "e") for one in term for key in ("minimum", "exclusiveMinimum") if key in one]
    highs = [(one[key], key[0] == "e") for one in term for key in ("maximum", "exclusiveMaximum") if key in one]
    return any(
        low > high or (low == high and (low_open or high_open))
        for (low, low_open), (high, high_open) in itertools.product(lows, highs)
    )


def _clash(term: Term) -> bool:
    """Whether no text has all patterns and formats, as llguidance sees it."""
    some = {one["pattern"] for one in term if "pattern" in one}
    formats = {one["format"] for one in term if "format" in one}
    if len(some) + len(formats) < 2 or sum(map(len, some)) > MAX_PATTERNS:
        return False
    return _do_clash(frozenset(some), frozenset(formats))


@functools.lru_cache(maxsize=1024)
def _do_clash(patterns: frozenset[str], formats: frozenset[str]) -> bool:
    from llguidance import LLMatcher

    all_of = [{"pattern": one} for one in patterns] + [{"format": one} for one in formats]
    grammar = LLMatcher.grammar_from_json_schema(json.dumps({"type": "string", "allOf": all_of}))
    return "Unsatisfiable" in LLMatcher.validate_grammar(grammar)


def text_patterns(term: Term) -> frozenset[str]:
    """Patterns that a text has to have; formats that no pattern says are left out."""
    some = {one["pattern"] for one in term if "pattern" in one}
    return frozenset(some | {_FORMATS[one["format"]] for one in term if one.get("format") in _FORMATS})


def _may_match(pattern: str, text: str) -> bool:
    try:
        return has_match(pattern, text)
    except UnreadError:
        return True


def _has_empty_item(term: Term, definitions: Mapping[int, Plain], depth: int) -> bool:
    num_items = max((one["minItems"] for one in term if "minItems" in one), default=0)
    return any(is_empty(_items(term, at), definitions, depth + 1) for at in range(min(num_items, 8)))


def _items(term: Term, at: int) -> list[Plain]:
    return [prefix[at] if at < len(prefix := one.get("prefixItems", [])) else one.get("items", True) for one in term]


def _has_empty_property(term: Term, definitions: Mapping[int, Plain], depth: int) -> bool:
    required = {name for one in term for name in one.get("required", ())}
    if any(one["maxProperties"] < len(required) for one in term if "maxProperties" in one):
        return True
    return any(is_empty(values(term, name), definitions, depth + 1) for name in required)


def conjuncts(schemas: Iterable[Plain], definitions: Mapping[int, Plain]) -> Term:
    """Schemas without parts that hold if `schemas` do. Those that only may hold are left out."""
    found: Term = []
    waiting = [(schema, 0) for schema in schemas]
    while waiting:
        schema, num_references = waiting.pop()
        if isinstance(schema, bool):
            continue
        found.append(schema)
        for kind, value, _ in parts(schema):
            if kind == "allOf":
                waiting += [(one, num_references) for one in value]
            elif kind == "$ref" and num_references < MAX_REFERENCES:
                waiting.append((definitions.get(value, True), num_references + 1))
    return found


def values(term: Term, name: str) -> list[Plain]:
    """What the value under a key has to match."""
    found: list[Plain] = []
    for one in term:
        if name in (properties := one.get("properties", {})):
            found.append(properties[name])
        elif "patternProperties" not in one:
            found.append(one.get("additionalProperties", True))
    return found


def _refuses(schema: Mapping[str, Any], value: Any) -> bool:
    """Whether the value certainly does not match. Parts, and most formats, are not looked at."""
    if type_of(value) not in types_of(schema):
        return True
    match value:
        case bool() | None:
            return False
        case int() | float():
            return _is_outside([schema, {"minimum": value, "maximum": value}])
        case str():
            is_long = not schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value))
            return is_long or not all(_may_match(pattern, value) for pattern in text_patterns([schema]))
        case list():
            return not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value))
        case dict():
            if any(name not in value for name in schema.get("required", ())):
                return True
            for name, one in value.items():
                for inner in values([schema], name):
                    if inner is False or (not isinstance(inner, bool) and _fails(inner, one)):
                        return True
    return False


def _fails(schema: Mapping[str, Any], value: Any) -> bool:
    if "enum" in schema and not any(is_same(value, one) for one in schema["enum"]):
        return True
    return _refuses(schema, value)
