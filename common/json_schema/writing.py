"""Writes plain schemas in the keywords that llguidance keeps."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

from common.json_schema import numbers
from common.json_schema.emptiness import is_empty
from common.json_schema.negation import Negation
from common.json_schema.patterns import UnreadError, has_inner_anchor, texts, unsupported
from common.json_schema.plain import (
    NUMBERS,
    TYPES,
    Plain,
    UnkeptError,
    all_of,
    is_equal,
    is_same,
    parts,
    type_of,
    types_of,
)
from common.json_schema.reading import FORMATS, Reader
from common.json_schema.references import step

MAX_SCHEMAS = 20_000  # that one schema may become
MAX_BRANCHES = 64  # of one keyword that is written as anyOf
MAX_ARRAYS = 400  # that are written out, of unique items
MAX_OVERLAPPING = 4  # patterns of keys
MAX_ROUNDS = 4
MAX_IMPLIED = 4  # references that are followed to know types
MAX_POSITIONS = 16  # at which an array contains what it has to

_STRING = ("minLength", "maxLength", "pattern", "format")
_ARRAY = ("prefixItems", "items", "minItems", "maxItems")
_OBJECT = ("properties", "patternProperties", "additionalProperties", "required", "minProperties", "maxProperties")

Written = dict[str, Any] | bool


def exact(schema: Any) -> Written:
    """A schema equal to `schema`, for llguidance. False if nothing matches. Raises `UnkeptError`."""
    reader = Reader(schema)
    root = reader.read()
    return _Writer(reader.definitions, reader.bounds).document(root)


class _Writer:
    def __init__(self, definitions: dict[int, Plain], bounds: set[float]) -> None:
        self._bounds = bounds
        self._definitions = definitions
        self._num_schemas = 0
        self._multiples: list[int | float] = []
        self._used: dict[int, None] = {}  # definitions that something refers to
        self._empty: set[int] = set()  # definitions that nothing matches

    def document(self, root: Plain) -> Written:
        """llguidance finds nothing in a choice of which one branch leads to a definition that nothing matches: so such
        references are written as False, too."""
        for _ in range(MAX_ROUNDS):
            written, definitions = self._once(root)
            empty = {number for number, definition in definitions.items() if definition is False}
            if empty <= self._empty:
                break
            self._empty |= empty
        if self._multiples:
            numbers.check_multiples(set(self._multiples), len(self._multiples), "#")
        if definitions and isinstance(written, dict):
            written["$defs"] = {str(number): definition for number, definition in definitions.items()}
        return written

    def _once(self, root: Plain) -> tuple[Written, dict[int, Written]]:
        self._num_schemas, self._used = 0, {}
        self._multiples.clear()
        written = self._schema(root, TYPES, "#")
        definitions: dict[int, Written] = {}
        while waiting := [number for number in self._used if number not in definitions]:
            for number in waiting:
                definitions[number] = self._schema(self._definitions[number], TYPES, f"#/$defs/{number}")
        return written, definitions

    def _schema(self, schema: Plain, types: frozenset[str], place: str) -> Written:
        """`types`: of the values that are asked about. Others may match what is written, or not."""
        self._num_schemas += 1
        if self._num_schemas > MAX_SCHEMAS:
            raise UnkeptError("schema", place, "becomes too large when its keywords are written out")
        if isinstance(schema, bool):
            return schema
        types &= self._all_types(schema, 0)
        if not types:
            return False
        enum = [value for value in schema["enum"] if type_of(value) in types] if "enum" in schema else None
        if enum is not None:
            types &= {type_of(value) for value in enum}
        written: dict[str, Any] = {}
        more: list[tuple[str, Any, str]] = []  # parts that keywords become
        if enum is not None:
            written["enum"] = enum
            if not enum:
                return False
        if "string" in types:
            written |= {key: schema[key] for key in _STRING if key in schema}
            _check_patterns("pattern", [schema["pattern"]] if "pattern" in schema else [], place)
            if "pattern" in written and has_inner_anchor(written["pattern"]):
                written["pattern"] = self._without_inner_anchors(written["pattern"])
            if written.get("format", "uri") not in FORMATS:
                raise UnkeptError("format", place, f"{written['format']!r} is not supported")
        if types & NUMBERS:
            self._number(schema, types, written, place)
        if "array" in types:
            more += self._array(schema, types, written, place)
        if "object" in types:
            more += self._object(schema, types, written, place)
        schema_parts = [*parts(schema), *more]
        if (
            enum is None
            and types != TYPES
            and (written or not any(self._implied(*part) <= types for part in schema_parts))
        ):
            written["type"] = self._types(types, place)
        found = [self._part(kind, value, where or place, schema, types) for kind, value, where in schema_parts]
        if any(part is False for part in found):
            return False
        num_before = schema.get("before", 0)
        before = [part for part in found[:num_before] if part is not True]
        after = [part for part in found[num_before:] if part is not True]
        if before:
            written = {"allOf": [*before, *([written] if written else []), *after]}
        elif after:
            written["allOf"] = after
        if set(written) == {"allOf"} and len(written["allOf"]) == 1:
            only: Written = written["allOf"][0]
            return only
        return written or True

    def _types(self, types: frozenset[str], place: str) -> str | list[str]:
        if "fraction" in types and "integer" not in types:
            raise UnkeptError("type", place, "numbers that are no integers cannot be told apart from those that are")
        names = sorted(types - NUMBERS)
        if types & NUMBERS:
            names.append("number" if "fraction" in types else "integer")
        return names[0] if len(names) == 1 else names

    def _implied(self, kind: str, value: Any, _: str, depth: int = 0) -> frozenset[str]:
        """Types of all that a part lets through."""
        if depth > MAX_IMPLIED:
            return TYPES
        match kind:
            case "$ref":
                return self._all_types(self._definitions[value], depth)
            case "allOf":
                return TYPES.intersection(*(self._all_types(one, depth) for one in value))
            case "anyOf" | "oneOf":
                return frozenset().union(*(self._all_types(one, depth) for one in value))
        return TYPES

    def _all_types(self, schema: Plain, depth: int) -> frozenset[str]:
        types = types_of(schema)
        return types.intersection(*(self._implied(*part, depth + 1) for part in parts(schema)))

    # --------------------------------------------------------------------------------------------------- parts

    def _part(self, kind: str, value: Any, where: str, schema: Plain, types: frozenset[str]) -> Written:
        match kind:
            case "$ref":
                target = self._definitions[value]
                if isinstance(target, bool):
                    return target
                if value in self._empty or not types & types_of(target):
                    return False
                self._used[value] = None
                return {"$ref": f"#/$defs/{value}"}
            case "allOf":
                return self._all(value, types, where)
            case "anyOf":
                return self._any(value, types, where)
            case "oneOf":
                return self._one(value, schema, types, where)
            case _:
                return self._schema(Negation(self._definitions, where).of(value, types, _beside(schema)), types, where)

    def _all(self, schemas: list[Plain], types: frozenset[str], place: str) -> Written:
        types = types.intersection(*(self._all_types(one, 0) for one in schemas))
        written = [self._schema(one, types, place) for one in schemas]
        if any(one is False for one in written):
            return False
        left = [one for one in written if one is not True]
        return left[0] if len(left) == 1 else {"allOf": left} if left else True

    def _any(self, schemas: list[Plain], types: frozenset[str], place: str) -> Written:
        written = [self._schema(one, types, place) for one in schemas]
        if any(one is True for one in written):
            return True
        left = [one for one in written if one is not False]
        return left[0] if len(left) == 1 else {"anyOf": left} if left else False

    def _one(self, schemas: list[Plain], schema: Plain, types: frozenset[str], place: str) -> Written:
        """As `anyOf` of branches that exclude each other. What two branches both take is taken out, and with it what no
        keyword of llguidance tells apart from that: some values that are allowed are never written."""
        beside: list[Plain] = [{"type": types}, *_beside(schema)]
        overlaps: dict[int, list[int]] = {number: [] for number in range(len(schemas))}
        for one, other in itertools.combinations(range(len(schemas)), 2):
            if not is_empty([*beside, schemas[one], schemas[other]], self._definitions):
                overlaps[one].append(other)
                overlaps[other].append(one)
        branches: list[Plain] = []
        for number, branch in enumerate(schemas):
            others = [schemas[other] for other in overlaps[number]]
            inside = types & self._all_types(branch, 0)
            if any(is_equal(branch, other) for other in others):
                continue
            try:
                negation = Negation(self._definitions, place, is_part_enough=True)
                apart = [negation.of(other, inside, [*beside, branch]) for other in others]
            except UnkeptError as error:
                reason = f"two of its branches may hold at once, and cannot be told apart ({error})"
                raise UnkeptError("oneOf", place, reason) from error
            branches.append(all_of([branch, *apart]))
        try:
            return self._any(branches, types, place)
        except UnkeptError as error:
            if not any(overlaps.values()):
                raise
            raise UnkeptError("oneOf", place, f"two of its branches may hold at once ({error})") from error

    # -------------------------------------------------------------------------------------------------- values

    def _number(self, schema: Any, types: frozenset[str], written: dict[str, Any], place: str) -> None:
        written |= numbers.bounds(schema, self._bounds, is_integer="fraction" not in types, place=place)
        if "multipleOf" in schema:
            written["multipleOf"] = schema["multipleOf"]
            self._multiples.append(schema["multipleOf"])

    def _array(
        self, schema: Any, types: frozenset[str], written: dict[str, Any], place: str
    ) -> list[tuple[str, Any, str]]:
        more: list[tuple[str, Any, str]] = []
        if "prefixItems" in schema:
            written["prefixItems"] = [self._schema(one, TYPES, f"{place}/prefixItems") for one in schema["prefixItems"]]
        if "items" in schema:
            written["items"] = self._schema(schema["items"], TYPES, f"{place}/items")
        written |= {key: schema[key] for key in ("minItems", "maxItems") if key in schema}
        if "contains" in schema:
            more += self._contains(schema, types, place)
        if schema.get("uniqueItems"):
            more += self._unique(schema, types, place)
        return more

    def _contains(self, schema: Any, types: frozenset[str], place: str) -> list[tuple[str, Any, str]]:
        least = schema.get("minContains", 1)
        if "maxContains" in schema or least > 1:
            raise UnkeptError("contains", place, "is not supported with minContains or maxContains")
        if least == 0:
            return []
        most = _max_items(schema)
        if schema["contains"] is True:
            most = 1
        most = min(most, MAX_POSITIONS)
        either: list[Plain] = [
            {"type": frozenset({"array"}), "minItems": at + 1, "prefixItems": [*[True] * at, schema["contains"]]}
            for at in range(int(most))
        ]
        return [("anyOf", _or_other(either, types, "array"), place)]

    def _unique(self, schema: Any, types: frozenset[str], place: str) -> list[tuple[str, Any, str]]:
        most = _max_items(schema)
        prefix: list[Plain] = schema.get("prefixItems", [])
        if most <= 1:
            return []
        if most <= len(prefix) and all(
            is_empty(pair, self._definitions) for pair in itertools.combinations(prefix[: int(most)], 2)
        ):
            return []
        values = None if prefix else self._values(schema.get("items", True))
        if values is None:
            raise UnkeptError("uniqueItems", place, "is only supported for items of a few constants, or maxItems of 1")
        lengths = range(min(schema.get("minItems", 0), len(values) + 1), int(min(most, len(values))) + 1)
        if sum(math.perm(len(values), length) for length in lengths) > MAX_ARRAYS:
            raise UnkeptError("uniqueItems", place, f"allows more than {MAX_ARRAYS} arrays")
        arrays = [list(some) for length in lengths for some in itertools.permutations(values, length)]
        either: list[Plain] = [{"type": frozenset({"array"}), "enum": arrays}]
        return [("anyOf", _or_other(either, types, "array"), place)]

    def _values(self, schema: Plain, depth: int = 0) -> list[Any] | None:
        """All values that can match it, and perhaps others; None if there are many."""
        if isinstance(schema, bool):
            return None if schema else []
        if "enum" in schema:
            values: list[Any] = []
            for value in schema["enum"]:
                if not any(is_same(value, one) for one in values):
                    values.append(value)
            return values
        if (types := types_of(schema)) <= {"null", "boolean"}:
            return [None] * ("null" in types) + [True, False] * ("boolean" in types)
        for kind, value, _ in parts(schema):
            if (
                kind == "$ref"
                and depth < 8
                and (found := self._values(self._definitions[value], depth + 1)) is not None
            ):
                return found
        return None

    # ------------------------------------------------------------------------------------------------- objects

    def _object(
        self, schema: Any, types: frozenset[str], written: dict[str, Any], place: str
    ) -> list[tuple[str, Any, str]]:
        if "propertyNames" in schema:
            schema = self._named(schema, place)
        _check_patterns("patternProperties", schema.get("patternProperties", ()), place)
        schema = self._disjoint(schema, place)
        for keyword in ("properties", "patternProperties"):
            if keyword in schema:
                written[keyword] = {
                    name: self._schema(one, TYPES, f"{place}/{keyword}/{step(name)}")
                    for name, one in schema[keyword].items()
                }
        if "additionalProperties" in schema:
            written["additionalProperties"] = self._schema(
                schema["additionalProperties"], TYPES, f"{place}/additionalProperties"
            )
        if "required" in schema:
            written["required"] = schema["required"]
        return self._counted(schema, types, written, place)

    def _without_inner_anchors(self, pattern: str) -> str:
        try:
            return texts(frozenset({pattern}), frozenset()) or "^(?:[^a]&&a)$"
        except UnreadError:
            return pattern  # llguidance says what is wrong

    def _disjoint(self, schema: Any, place: str) -> Any:
        """`patternProperties` of which no two hold for one key: llguidance knows no others."""
        patterns: dict[str, Plain] = schema.get("patternProperties", {})
        if len(patterns) < 2:
            return schema
        try:
            pairs = [set(two) for two in itertools.combinations(patterns, 2) if texts(frozenset(two), frozenset())]
        except UnreadError:
            return schema  # llguidance tells them apart, or says that it cannot
        if not pairs:
            return schema
        if len(patterns) > MAX_OVERLAPPING:
            raise UnkeptError(
                "patternProperties", place, f"is only supported with {MAX_OVERLAPPING} patterns that overlap"
            )
        cells: dict[str, Plain] = {}
        try:
            for size in range(1, len(patterns) + 1):
                for some in itertools.combinations(patterns, size):
                    if pattern := texts(frozenset(some), frozenset(patterns) - frozenset(some)):
                        cells[pattern] = all_of([patterns[one] for one in some])
        except UnreadError as error:
            reason = f"two of its patterns may hold for one key, and one {error}"
            raise UnkeptError("patternProperties", place, reason) from error
        return {**schema, "patternProperties": cells}

    def _counted(
        self, schema: Any, types: frozenset[str], written: dict[str, Any], place: str
    ) -> list[tuple[str, Any, str]]:
        """`minProperties` and `maxProperties`. llguidance counts keys without a name in the schema, but does not see
        to it that they differ: no more than one of them may be needed."""
        least, most = schema.get("minProperties", 0), schema.get("maxProperties", math.inf)
        required: list[str] = schema.get("required", [])
        properties: dict[str, Plain] = schema.get("properties", {})
        optional = [name for name, one in properties.items() if one is not False and name not in required]
        is_closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
        if least <= len(required):
            least = 0
        if is_closed and most >= len(required) + len(optional):
            most = math.inf
        if not least and most == math.inf:
            return []
        if not optional:
            if least - len(required) > 1 and not is_closed:
                raise UnkeptError("minProperties", place, "keys that the schema does not name may repeat each other")
            written |= {"minProperties": least} if least else {}
            written |= {"maxProperties": most} if most < math.inf else {}
            return []
        missing = least - len(required)
        if most == math.inf and is_closed:
            self._check_branches(math.comb(len(optional), missing), place)
            either = [_present([*required, *some]) for some in itertools.combinations(optional, missing)]
        elif most == math.inf and missing == 1:
            either = [_present([*required, name]) for name in optional]
            either.append(_present(required, optional) | {"minProperties": least})
        else:
            sizes = range(int(min(len(optional), most - len(required))) + 1 if most >= len(required) else 0)
            self._check_branches(sum(math.comb(len(optional), size) for size in sizes), place)
            either = []
            for some in (some for size in sizes for some in itertools.combinations(optional, size)):
                branch = _present([*required, *some], [name for name in optional if name not in some])
                if is_closed and len(required) + len(some) < least:
                    continue
                if not is_closed:
                    branch |= {"minProperties": least} if least else {}
                    branch |= {"maxProperties": most} if most < math.inf else {}
                either.append(branch)
        return [("anyOf", _or_other(either, types, "object"), place)]

    def _check_branches(self, num: int, place: str) -> None:
        if num > MAX_BRANCHES:
            raise UnkeptError("minProperties or maxProperties", place, "allows too many combinations of keys")

    def _named(self, schema: Any, place: str) -> Any:
        """Without `propertyNames`: with keys of those names alone."""
        names = self._resolved(schema["propertyNames"])
        changed = {key: value for key, value in schema.items() if key != "propertyNames"}
        properties: dict[str, Plain] = dict(schema.get("properties", {}))
        other: Plain = schema.get("additionalProperties", True)
        if names is True:
            return changed
        if names is False or "string" not in types_of(names):
            return changed | {"maxProperties": 0}
        known = set(names) - {"type"}
        if (
            "patternProperties" in schema
            or len(known) > 1
            or not known <= {"enum", "pattern", "minLength", "maxLength"}
        ):
            raise UnkeptError("propertyNames", place, "is only supported for a list of names, a pattern, or a length")
        if "enum" in known:
            allowed = [name for name in names["enum"] if isinstance(name, str)]
            kept: dict[str, Plain] = {name: one if name in allowed else False for name, one in properties.items()}
            return changed | {
                "properties": kept | {name: other for name in allowed if name not in kept},
                "additionalProperties": False,
            }
        pattern = names.get("pattern")
        if pattern is None:
            pattern = f"^(?s:.){{{names.get('minLength', 0)},{names.get('maxLength', '')}}}$"
        for name in {*properties, *schema.get("required", ())}:
            try:
                fits = re.search(pattern.replace("(?s:.)", "[^~]"), name) is not None
            except re.error as error:
                raise UnkeptError("propertyNames", place, "its pattern cannot be compared with properties") from error
            if not fits:
                properties[name] = False
        changed["properties"] = properties
        return changed | {"patternProperties": {pattern: other}, "additionalProperties": False}

    def _resolved(self, schema: Plain, depth: int = 0) -> Plain:
        """What a schema refers to, if that is all that it does."""
        if isinstance(schema, bool) or depth > 8:
            return schema
        only = parts(schema)
        if len(only) == 1 and only[0][0] == "$ref" and not set(schema) - {"type", "parts"}:
            target = self._resolved(self._definitions[only[0][1]], depth + 1)
            if isinstance(target, bool) or types_of(schema) >= types_of(target):
                return target
        return schema


def _check_patterns(keyword: str, patterns: Iterable[str], place: str) -> None:
    for pattern in patterns:
        if lacking := unsupported(pattern):
            raise UnkeptError(keyword, place, f"{lacking} is not supported in {pattern!r}")


def _beside(schema: Plain) -> list[Plain]:
    """What holds beside the parts of a schema."""
    return [] if isinstance(schema, bool) else [{key: value for key, value in schema.items() if key != "parts"}]


def _present(names: list[str], absent: Iterable[str] = ()) -> dict[str, Any]:
    """An object with some keys, and without some."""
    schema: dict[str, Any] = {"type": frozenset({"object"}), "required": names}
    return schema | {"properties": dict.fromkeys(absent, False)} if absent else schema


def _max_items(schema: Any) -> float:
    most: float = schema.get("maxItems", math.inf)
    if schema.get("items") is False:
        most = min(most, len(schema.get("prefixItems", ())))
    return most


def _or_other(either: Sequence[Plain], types: frozenset[str], kind: str) -> list[Plain]:
    """`either` for values of one type, and all others of `types`."""
    others = types - {kind}
    return [*either, {"type": others}] if others else list(either)
