"""The schema of all that does not match a plain schema, if plain schemas can say that."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from common.json_schema.emptiness import Term, conjuncts, is_empty, values
from common.json_schema.plain import (
    NUMBERS,
    TYPES,
    Plain,
    UnkeptError,
    all_of,
    any_of,
    is_equal,
    parts,
    type_of,
    types_of,
)

MAX_DEPTH = 12
MAX_TEXT = 1000  # characters of texts that a value must not be
MAX_TEXT_LENGTH = 100

_OF_TYPE = {
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"), NUMBERS),
    **dict.fromkeys(("minLength", "maxLength", "pattern", "format"), frozenset({"string"})),
    **dict.fromkeys(("minItems", "maxItems", "items", "prefixItems", "contains", "uniqueItems"), frozenset({"array"})),
    **dict.fromkeys(
        (
            *("required", "properties", "additionalProperties", "patternProperties", "propertyNames"),
            *("minProperties", "maxProperties"),
        ),
        frozenset({"object"}),
    ),
}
_OTHER_BOUND = {
    "minimum": "exclusiveMaximum",
    "maximum": "exclusiveMinimum",
    "exclusiveMinimum": "maximum",
    "exclusiveMaximum": "minimum",
}


class Negation:
    def __init__(self, definitions: Mapping[int, Plain], place: str) -> None:
        """`place`: of the keyword that asks for it, for the words of `UnkeptError`."""
        self._definitions = definitions
        self._place = place

    def of(self, schema: Plain, types: frozenset[str] = TYPES, given: Iterable[Plain] = (), depth: int = 0) -> Plain:
        """Of values of these types alone, for which the schemas `given` hold; others may match it or not. Raises
        `UnkeptError`."""
        if isinstance(schema, bool):
            return not schema
        if depth > MAX_DEPTH:
            raise self._unkept("it is nested too deeply")
        known = conjuncts(given, self._definitions)
        if any(is_equal(one, schema) for one in known):
            return False
        inside = types_of(schema) & types
        found: list[Plain] = [{"type": types - inside}] if types - inside else []
        for keyword, value in schema.items():
            if keyword == "enum":
                found.append(self._other_than(value, inside))
            elif (applies := _OF_TYPE.get(keyword, frozenset()) & inside) and not _is_given(known, schema, keyword):
                found.append(self._keyword(schema, keyword, value, applies, known, depth))
        for kind, value, _ in parts(schema):
            found.append(self._part(kind, value, inside, known, depth + 1))
        return any_of(found)

    def _part(self, kind: str, value: Any, types: frozenset[str], known: Term, depth: int) -> Plain:
        match kind:
            case "$ref":
                return self._within(self.of(self._definitions.get(value, True), types, known, depth), types)
            case "allOf":
                return self._within(any_of([self.of(one, types, known, depth) for one in value]), types)
            case "oneOf" if not all(is_empty(two, self._definitions) for two in itertools.combinations(value, 2)):
                raise self._unkept(f"of {kind} it is only supported if its branches exclude each other")
            case "anyOf" | "oneOf":
                return self._within(all_of([self.of(one, types, known, depth) for one in value]), types)
            case "not":
                return self._within(value, types)
        raise self._unkept(f"of {kind} it is not supported")

    def _within(self, schema: Plain, types: frozenset[str]) -> Plain:
        return schema if schema is False else all_of([{"type": types}, schema])

    def _keyword(
        self, schema: Mapping[str, Any], keyword: str, value: Any, types: frozenset[str], known: Term, depth: int
    ) -> Plain:
        match keyword:
            case "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum":
                return {"type": types, _OTHER_BOUND[keyword]: value}
            case "minLength" | "minItems" | "minProperties":
                other = keyword.replace("min", "max")
                return {"type": types, other: value - 1} if value else False
            case "maxLength" | "maxItems" | "maxProperties":
                return {"type": types, keyword.replace("max", "min"): value + 1}
            case "required":
                return any_of([{"type": types, "properties": {name: False}} for name in value])
            case "properties":
                return any_of(
                    [
                        {"type": types, "required": [name], "properties": {name: negated}}
                        for name, inner in value.items()
                        if (negated := self.of(inner, given=values(known, name), depth=depth + 1)) is not False
                    ]
                )
            case "contains" if schema.get("minContains", 1) == 1 and "maxContains" not in schema:
                return {"type": types, "items": self.of(value, depth=depth + 1)}
            case "prefixItems":
                return any_of(
                    [
                        {"type": types, "minItems": at + 1, "prefixItems": [*[True] * at, negated]}
                        for at, inner in enumerate(value)
                        if (negated := self.of(inner, depth=depth + 1)) is not False
                    ]
                )
            case "items" | "additionalProperties" | "propertyNames" if value is True:
                return False
            case "items" if value is False:
                return {"type": types, "minItems": len(schema.get("prefixItems", ())) + 1}
            case "items" if "prefixItems" not in schema and self._follows(value, known, "items", depth):
                return False
            case "additionalProperties" if value is False and "patternProperties" not in schema:
                # One more key: those that it may have are known if something else limits them.
                named = schema.get("properties", {})
                for one in known:
                    if one.get("additionalProperties") is False and "patternProperties" not in one:
                        return any_of(
                            [
                                {"type": types, "required": [name]}
                                for name in one.get("properties", {})
                                if name not in named
                            ]
                        )
        raise self._unkept(f"of {keyword} it is not supported")

    def _follows(self, schema: Plain, known: Term, keyword: str, depth: int) -> bool:
        """Whether all that `keyword` lets through matches `schema`."""
        given = [one[keyword] for one in known if keyword in one and "prefixItems" not in one]
        return bool(given) and self.of(schema, given=given, depth=depth + 1) is False

    def _other_than(self, values: Iterable[Any], types: frozenset[str]) -> Plain:
        found: list[Plain] = []
        if numbers := types & NUMBERS:  # both kinds at once: llguidance cannot tell fractions apart
            found.append(all_of([{"type": numbers}, *(_unlike(one) for one in values if type_of(one) in NUMBERS)]))
        for kind in sorted(types - NUMBERS):
            same = [value for value in values if type_of(value) == kind]
            if not same:
                found.append({"type": frozenset({kind})})
            elif kind == "boolean":
                found.append({"type": frozenset({kind}), "enum": [one for one in (True, False) if one not in same]})
            elif kind == "string":
                found.append({"type": frozenset({kind}), "pattern": self._pattern(same)})
            elif kind == "array" and same == [[]]:
                found.append({"type": frozenset({kind}), "minItems": 1})
            elif kind == "object" and same == [{}]:
                found.append({"type": frozenset({kind}), "minProperties": 1})
            elif kind != "null":
                raise self._unkept(f"of a constant {kind} it is not supported")
        return any_of(found)

    def _pattern(self, texts: list[str]) -> str:
        """What matches every other text."""
        if sum(map(len, texts)) > MAX_TEXT or max(map(len, texts)) > MAX_TEXT_LENGTH:
            raise self._unkept("there are too many texts that a value must not be")
        if any("\ud800" <= one <= "\udfff" for text in texts for one in text):
            raise self._unkept("half a surrogate pair is no text")
        return f"^{_others(frozenset(texts))}$"

    def _unkept(self, reason: str) -> UnkeptError:
        return UnkeptError("not", self._place, reason)


def _is_given(known: Term, schema: Mapping[str, Any], keyword: str) -> bool:
    """Whether a keyword means the same in a schema that holds."""
    beside = {"items": ("prefixItems",), "additionalProperties": ("properties", "patternProperties")}.get(keyword, ())
    return any(
        keyword in one
        and is_equal(one[keyword], schema[keyword])
        and all(_names(one.get(other, ())) == _names(schema.get(other, ())) for other in beside)
        for one in known
    )


def _names(value: Any) -> Any:
    return set(value) if isinstance(value, dict) else len(value)


def _unlike(value: int | float) -> Plain:
    return any_of([{"type": NUMBERS, "exclusiveMaximum": value}, {"type": NUMBERS, "exclusiveMinimum": value}])


def _others(texts: frozenset[str]) -> str:
    """A regular expression of all texts but these."""
    after: dict[str, set[str]] = {}
    for text in texts:
        if text:
            after.setdefault(text[0], set()).add(text[1:])
    if not after:
        return "[^a]|(?s:.)+" if not texts else "(?s:.)+"
    escaped = {first: f"\\u{{{ord(first):x}}}" for first in after}
    options = [f"[^{''.join(escaped.values())}](?s:.)*"]
    options += [escaped[first] + _others(frozenset(rests)) for first, rests in after.items()]
    return f"(?:{'|'.join(options)}{'' if '' in texts else '|'})"
