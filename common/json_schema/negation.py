"""The schema of all that does not match a plain schema, if plain schemas can say that."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from common.json_schema.emptiness import Term, conjuncts, is_empty, text_patterns, values
from common.json_schema.patterns import UnreadError, has_match, texts
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
MAX_PAIRS = 28  # of branches of a oneOf that may hold at once
MAX_POSITIONS = 16  # at which an item may be another one
FREE_POSITIONS = 1  # as many, in arrays without an end, if a part is enough
MAX_OPTIONAL = 5  # keys that may be there or not, beside one that has no name
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
    def __init__(self, definitions: Mapping[int, Plain], place: str, *, is_part_enough: bool = False) -> None:
        """`place`: of the keyword that asks for it, for the words of `UnkeptError`. `is_part_enough`: alternatives that
        cannot be said may be left out if others remain, so that some of what does not match is left out, too."""
        self._definitions = definitions
        self._place = place
        self._is_part_enough = is_part_enough

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
        others = types - inside
        if self._is_part_enough and others & NUMBERS == {"fraction"} and (others > {"fraction"} or len(schema) > 1):
            others -= {"fraction"}  # they cannot be told apart from integers
        found: list[Callable[[], Plain]] = [lambda: {"type": others}] if others else []
        for keyword, value in schema.items():
            if keyword == "enum":
                found.append(partial(self._other_than, value, inside))
            elif (applies := _OF_TYPE.get(keyword, frozenset()) & inside) and not _is_given(known, schema, keyword):
                found.append(partial(self._keyword, schema, keyword, value, applies, known, depth))
        for kind, value, _ in parts(schema):
            found.append(partial(self._part, kind, value, inside, known, depth + 1))
        return self._any(found)

    def _any(self, alternatives: Iterable[Callable[[], Plain]]) -> Plain:
        found: list[Plain] = []
        unkept: UnkeptError | None = None
        for alternative in alternatives:
            try:
                found.append(alternative())
            except UnkeptError as error:
                if not self._is_part_enough:
                    raise
                unkept = unkept or error
        either = any_of(found)
        if either is False and unkept is not None:
            raise unkept
        return either

    def _part(self, kind: str, value: Any, types: frozenset[str], known: Term, depth: int) -> Plain:
        match kind:
            case "$ref":
                return self._within(self.of(self._definitions.get(value, True), types, known, depth), types)
            case "allOf":
                return self._within(self._any([partial(self.of, one, types, known, depth) for one in value]), types)
            case "anyOf" | "oneOf":
                none = partial(self._none_of, value, types, known, depth)
                return self._any([none, lambda: self._two_of(value, types, known)]) if kind == "oneOf" else none()
            case "not":
                return self._within(value, types)
        raise self._unkept(f"of {kind} it is not supported")

    def _none_of(self, schemas: list[Plain], types: frozenset[str], known: Term, depth: int) -> Plain:
        return self._within(all_of([self.of(one, types, known, depth) for one in schemas]), types)

    def _two_of(self, schemas: list[Plain], types: frozenset[str], known: Term) -> Plain:
        """Values for which two of them hold."""
        pairs = [two for two in itertools.combinations(schemas, 2) if not is_empty([*known, *two], self._definitions)]
        if len(pairs) > MAX_PAIRS:
            raise self._unkept("of oneOf it is not supported if so many of its branches may hold at once")
        return any_of([all_of([{"type": types}, *two]) for two in pairs])

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
                return self._any(
                    [partial(self._other_value, name, inner, types, known, depth) for name, inner in value.items()]
                )
            case "contains" if schema.get("minContains", 1) == 1 and "maxContains" not in schema:
                return {"type": types, "items": self.of(value, depth=depth + 1)}
            case "pattern" | "format":
                return self._other_texts({keyword: value}, known)
            case "prefixItems":
                return self._any(
                    [partial(self._item_at, at, inner, types, (), depth) for at, inner in enumerate(value)]
                )
            case "items" | "additionalProperties" | "propertyNames" if value is True:
                return False
            case "items" if value is False:
                return {"type": types, "minItems": len(schema.get("prefixItems", ())) + 1}
            case "items" if "prefixItems" not in schema and self._follows(value, known, "items", depth):
                return False
            case "items" if "prefixItems" not in schema:
                return self._other_item(value, types, known, depth)
            case "additionalProperties" | "patternProperties" | "propertyNames":
                return self._other_key(schema, keyword, types, known, depth)
        raise self._unkept(f"of {keyword} it is not supported")

    def _other_texts(self, schema: Mapping[str, Any], known: Term) -> Plain:
        """Texts that do not have a pattern or a format."""
        (keyword,) = schema
        others, given = text_patterns([schema]), text_patterns(known)
        if not others:
            raise self._unkept(f"of this {keyword} it is not supported")
        try:
            if given and texts(given, others) is None:
                return False
        except UnreadError:
            given = frozenset()
        try:
            try:
                pattern = texts(frozenset(), others)
            except UnreadError:
                if not given:
                    raise
                pattern = texts(given, others)
        except UnreadError as error:
            raise self._unkept(f"of {keyword} it is not supported if that {error}") from error
        return False if pattern is None else {"type": frozenset({"string"}), "pattern": pattern}

    def _other_item(self, schema: Plain, types: frozenset[str], known: Term, depth: int) -> Plain:
        """Arrays with an item that does not match."""
        given = [one for one in known if "items" in one and "prefixItems" not in one]
        if any(is_empty([one["items"], schema], self._definitions) for one in given):
            return {"type": types, "minItems": 1}  # none of them matches
        most = min((one["maxItems"] for one in known if "maxItems" in one), default=MAX_POSITIONS + 1)
        if most > MAX_POSITIONS:
            if not self._is_part_enough:
                raise self._unkept(f"of items it is only supported with maxItems of at most {MAX_POSITIONS}")
            most = FREE_POSITIONS
        inside = [one["items"] for one in given]
        return self._any([partial(self._item_at, at, schema, types, inside, depth) for at in range(most)])

    def _item_at(self, at: int, schema: Plain, types: frozenset[str], given: Iterable[Plain], depth: int) -> Plain:
        """Arrays with such an item there that does not match."""
        negated = self.of(schema, given=given, depth=depth + 1)
        if negated is False:
            return False
        return {"type": types, "minItems": at + 1, "prefixItems": [*[True] * at, negated]}

    def _other_value(self, name: str, schema: Plain, types: frozenset[str], known: Term, depth: int) -> Plain:
        """Objects with a value under this key that does not match."""
        negated = self.of(schema, given=values(known, name), depth=depth + 1)
        return negated and {"type": types, "required": [name], "properties": {name: negated}}

    def _other_key(
        self, schema: Mapping[str, Any], keyword: str, types: frozenset[str], known: Term, depth: int
    ) -> Plain:
        """Objects with a key that is not allowed there, or whose value is not."""
        for one in known:
            if one.get("additionalProperties") is False and "patternProperties" not in one:
                return self._one_of_keys(list(one.get("properties", {})), schema, keyword, types, known, depth)
        value = schema[keyword]
        named = schema.get("properties", {})
        match keyword:
            case "propertyNames":
                if value is False:
                    return {"type": types, "minProperties": 1}
                names = self._finite(self.of(value, frozenset({"string"}), depth=depth + 1))
                if names is not None:
                    return any_of([{"type": types, "required": [name]} for name in names])
                if set(value) == {"type", "enum"} and "string" in types_of(value):
                    return self._one_more([name for name in value["enum"] if isinstance(name, str)], types)
            case "additionalProperties" if value is False and "patternProperties" not in schema:
                return self._one_more(list(named), types)
        raise self._unkept(f"of {keyword} it is not supported")

    def _one_of_keys(
        self,
        names: list[str],
        schema: Mapping[str, Any],
        keyword: str,
        types: frozenset[str],
        known: Term,
        depth: int,
    ) -> Plain:
        """One of these keys breaks what `keyword` says."""
        try:
            asked = [(name, inner) for name in names for inner in self._asked_of(name, schema, keyword)]
        except UnreadError as error:
            raise self._unkept(f"of {keyword} it is not supported if a pattern {error}") from error
        return self._any([partial(self._other_value, name, inner, types, known, depth) for name, inner in asked])

    def _asked_of(self, name: str, schema: Mapping[str, Any], keyword: str) -> list[Plain]:
        """What `keyword` asks of the value of a key."""
        patterns = schema.get("patternProperties", {})
        match keyword:
            case "patternProperties":
                return [inner for pattern, inner in patterns.items() if has_match(pattern, name)]
            case "additionalProperties":
                is_other = name not in schema.get("properties", {}) and not any(
                    has_match(one, name) for one in patterns
                )
                return [schema[keyword]] if is_other else []
        exact = Negation(self._definitions, self._place)
        is_allowed = is_empty([exact.of(schema[keyword]), {"type": TYPES, "enum": [name]}], self._definitions)
        if not is_allowed and not is_empty([schema[keyword], {"type": TYPES, "enum": [name]}], self._definitions):
            raise self._unkept("of propertyNames it is not supported")
        return [is_allowed]

    def _one_more(self, names: list[Any], types: frozenset[str]) -> Plain:
        """Objects with a key beside these."""
        if len(names) > MAX_OPTIONAL:
            raise self._unkept("of so many names of keys it is not supported")
        found: list[Plain] = []
        for size in range(len(names) + 1):
            for some in itertools.combinations(names, size):
                absent: dict[Any, Plain] = {name: False for name in names if name not in some}
                one: dict[str, Any] = {"type": types, "required": list(some), "minProperties": size + 1}
                found.append(one | {"properties": absent} if absent else one)
        return any_of(found)

    def _finite(self, schema: Plain) -> list[Any] | None:
        """All values that match it, if it says no more than which they are."""
        if isinstance(schema, bool):
            return None if schema else []
        if "enum" in schema and not parts(schema) and not set(schema) - {"type", "enum"}:
            return [value for value in schema["enum"] if type_of(value) in types_of(schema)]
        only = parts(schema)
        if len(only) == 1 and not set(schema) - {"type", "parts"} and only[0][0] in ("allOf", "anyOf"):
            kind, some, _ = only[0]
            found = [self._finite(one) for one in some if one is not True]
            if kind == "anyOf":
                if any(one is None for one in found):
                    return None
                return [value for one in found for value in one or []]
            lists = [one for one in found if one is not None]
            rest = [one for one in some if one is not True and self._finite(one) is None]
            if len(lists) == 1 and all(set(one) == {"type"} for one in rest if not isinstance(one, bool)):
                return [value for value in lists[0] if all(type_of(value) in types_of(one) for one in rest)]
        return None

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
            elif kind == "array":
                found.append(all_of([self._other_array(one) for one in same]))
            elif kind == "object":
                found.append(all_of([self._other_object(one) for one in same]))
        return any_of(found)

    def _other_array(self, value: list[Any]) -> Plain:
        kind, num = frozenset({"array"}), len(value)
        found: list[Plain] = [{"type": kind, "minItems": num + 1}]
        if num:
            found.append({"type": kind, "maxItems": num - 1})
        for at, one in enumerate(value):
            other = self._other_than([one], TYPES)
            found.append({"type": kind, "minItems": num, "maxItems": num, "prefixItems": [*[True] * at, other]})
        return any_of(found)

    def _other_object(self, value: dict[str, Any]) -> Plain:
        kind = frozenset({"object"})
        found: list[Plain] = [{"type": kind, "required": list(value), "minProperties": len(value) + 1}]
        for name, one in value.items():
            found.append({"type": kind, "properties": {name: False}})
            found.append({"type": kind, "required": [name], "properties": {name: self._other_than([one], TYPES)}})
        return any_of(found)

    def _pattern(self, some: list[str]) -> str:
        """What matches every other text."""
        if sum(map(len, some)) > MAX_TEXT or max(map(len, some)) > MAX_TEXT_LENGTH:
            raise self._unkept("there are too many texts that a value must not be")
        if any("\ud800" <= one <= "\udfff" for text in some for one in text):
            raise self._unkept("half a surrogate pair is no text")
        return f"^{_others(frozenset(some))}$"

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


def _others(some: frozenset[str]) -> str:
    """A regular expression of all texts but these."""
    after: dict[str, set[str]] = {}
    for text in some:
        if text:
            after.setdefault(text[0], set()).add(text[1:])
    if not after:
        return "[^a]|(?s:.)+" if not some else "(?s:.)+"
    escaped = {first: f"\\u{{{ord(first):x}}}" for first in after}
    options = [f"[^{''.join(escaped.values())}](?s:.)*"]
    options += [escaped[first] + _others(frozenset(rests)) for first, rests in after.items()]
    return f"(?:{'|'.join(options)}{'' if '' in some else '|'})"
