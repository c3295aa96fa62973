"""Reads a client's schema into plain ones: references are resolved, and what constrains nothing is dropped.

Older drafts are read as what they mean in 2020-12. Keywords that a draft does not know constrain nothing in it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from common.json_schema import numbers
from common.json_schema.patterns import lookaheads
from common.json_schema.plain import NUMBERS, TYPES, Plain, UnkeptError, all_of, any_of, is_same
from common.json_schema.references import DRAFT_6, DRAFT_7, DRAFT_2019, Document, Location

# Formats that llguidance keeps, and those that the standard defines and llguidance lacks. Any other is an annotation,
# says the standard.
_UNKEPT_FORMATS = frozenset(("idn-hostname",))
FORMATS = frozenset({"duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})

# Formats that llguidance lacks and a pattern says, of most texts. Left out are: of references (RFC 3986, 3987) those
# with an IP literal; of addresses (RFC 6531) quoted ones and the letters of some scripts; of regular expressions names
# of groups, groups four deep, and what engines disagree about.
_TOKENS = "(?:/(?:[^/~]|~[01])*)*"
_HOST = "(?:[A-Za-z0-9._~!$&'()*+,;=-]|%[0-9A-Fa-f]{2})"
_FIRST, _NEXT = _HOST.replace("=-]", "=@-]"), _HOST.replace("=-]", "=:@-]")
_ROOTED = f"//(?:(?:{_HOST}|:)*@)?{_HOST}*(?::[0-9]*)?(?:/{_NEXT}*)*|/(?:{_NEXT}+(?:/{_NEXT}*)*)?"
_REFERENCE = (
    f"(?:{_ROOTED}|{_FIRST}+(?:/{_NEXT}*)*)?",
    f"(?:[?](?:{_NEXT}|[/?])*)?(?:#(?:{_NEXT}|[/?])*)?",
)
_ABSOLUTE = f"[A-Za-z][A-Za-z0-9+.-]*:(?:{_ROOTED}|{_NEXT}+(?:/{_NEXT}*)*)?"
_URI_REFERENCE = f"^(?:{_ABSOLUTE}|{_REFERENCE[0]}){_REFERENCE[1]}$"


def _international(pattern: str) -> str:
    """Of IRIs (RFC 3987), from that of URIs."""
    return pattern.replace("[A-Za-z0-9._~", r"[\u{a0}-\u{d7ff}\u{f900}-\u{fdcf}\u{fdf0}-\u{ffef}A-Za-z0-9._~")


_ATOM = r"[\u{a1}-\u{d7ff}\u{f900}-\u{fdcf}\u{fdf0}-\u{ffef}A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_OTHER_LABEL = r"[a-z0-9\u{e0}-\u{f6}\u{f8}-\u{ff}\u{3041}-\u{3096}\u{4e00}-\u{9fff}\u{ac00}-\u{d7a3}]{1,16}"
_VARIABLE = "(?:[A-Za-z0-9_]|%[0-9A-Fa-f]{2})(?:[.]?(?:[A-Za-z0-9_]|%[0-9A-Fa-f]{2}))*(?::[1-9][0-9]{0,3}|[*])?"


def _expressions(depth: int) -> str:
    """Of regular expressions (ECMA-262) with groups of this depth."""
    escape = r"\\(?:[dDwWsStnrvf]|x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|[\^$\\.*+?()\[\]{}|/-])"
    ranges = "a-z|A-Z|0-9|a-f|A-F|a-zA-Z"
    chars = rf"(?:{ranges}|{escape}|[^\u{{0}}-\u{{1f}}\\\[\]\^&~|-])"
    atom = rf"{escape}|[^\u{{0}}-\u{{1f}}\\()\[\]{{}}|*+?^$]|\[\^?-?{chars}+-?\]"
    if depth:
        inner = _expressions(depth - 1)
        atom += rf"|\((?:\?:)?{inner}\)"
        around = rf"|\(\?[=!]{inner}\)"
    else:
        around = ""
    count = r"\{(?:[0-9]{1,3},?|[01],[1-9][0-9]{0,2}|[0-9],[1-9][0-9]{1,2})\}"
    one = rf"(?:(?:{atom})(?:[*+?]|{count})?[?]?|\^|\$|\\b{around})"
    return rf"{one}*(?:\|{one}*)*"


# Of dates and times (RFC 3339): llguidance takes 29 February in all years, and a leap second at any time. Here a leap
# second is at 23:59:60 UTC, and UTC is its only offset.
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DATE = (
    "(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_TIME = (
    "(?:(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:[.][0-9]+)?(?:[Zz]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
    "|23:59:60(?:[.][0-9]+)?(?:[Zz]|[+-]00:00))"
)

_PATTERNS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}[Tt]{_TIME}$",
    "json-pointer": f"^{_TOKENS}$",
    "relative-json-pointer": f"^(?:0|[1-9][0-9]*)(?:#|{_TOKENS})$",
    "uri-reference": _URI_REFERENCE,
    "iri-reference": _international(_URI_REFERENCE),
    "iri": _international(f"^{_ABSOLUTE}{_REFERENCE[1]}$"),
    "idn-email": rf"^{_ATOM}(?:\.{_ATOM})*@(?:{_LABEL}|{_OTHER_LABEL})(?:\.(?:{_LABEL}|{_OTHER_LABEL}))*$",
    "uri-template": (
        rf"^(?:[^\u{{0}}-\u{{20}}\"'%<>\\\^`{{|}}\u{{7f}}-\u{{9f}}]|%[0-9A-Fa-f]{{2}}"
        rf"|\{{[+#./;?&]?{_VARIABLE}(?:,{_VARIABLE})*\}})*$"
    ),
    "regex": f"^(?:{_expressions(3)})$",
}
_SINCE = {
    **dict.fromkeys(("contains", "propertyNames"), DRAFT_6),
    "if": DRAFT_7,
    **dict.fromkeys(
        [
            "prefixItems",
            "dependentRequired",
            "dependentSchemas",
            "minContains",
            "maxContains",
            "unevaluatedItems",
            "unevaluatedProperties",
            "$dynamicRef",
            "$recursiveRef",
        ],
        DRAFT_2019,
    ),
}
_MAX_SIZE = 2**32 - 1  # that llguidance reads. As an upper bound a larger one constrains nothing
_SIZES = [
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "minProperties",
    "maxProperties",
    "minContains",
    "maxContains",
]


class Reader:
    """Of one document. `definitions` is complete once `read` has returned."""

    def __init__(self, root: Any) -> None:
        self._document = Document(root)
        self._root = root
        self._numbers: dict[tuple[str, ...], int] = {}  # of definitions, by their paths
        self._waiting: list[tuple[Any, Location, int]] = []
        self.definitions: dict[int, Plain] = {}
        self.bounds: set[float] = set()  # of numbers, in all of the document

    def read(self) -> Plain:
        """The root. Raises `UnkeptError`."""
        root = self._schema(self._root, Location())
        while self._waiting:
            schema, location, number = self._waiting.pop()
            self.definitions[number] = self._schema(schema, location)
        return root

    def _schema(self, schema: Any, location: Location) -> Plain:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise UnkeptError("schema", str(location), "must be an object, or true or false")
        location = self._document.at(schema, location)
        plain: dict[str, Any] = {"type": self._types(schema, location)}
        parts: list[tuple[str, Any, str]] = []
        late: list[tuple[str, Any, str]] = []
        for keyword, value in schema.items():
            if _SINCE.get(keyword, 0) > location.draft:
                continue
            if keyword == "pattern" and isinstance(value, str) and (ahead := lookaheads(value)) is not None:
                _check_pattern(value, keyword, location)
                parts.append(("allOf", self._ahead(*ahead, location), str(location / keyword)))
                continue
            if (read := _KEYWORDS.get(keyword)) is not None and not (keyword == "format" and value in list(_PATTERNS)):
                read(self, schema, value, location, plain)
                if keyword in ("properties", "prefixItems", "items"):
                    plain["before"] = len(parts)
            elif keyword == "format" and value in list(_PATTERNS):
                parts.append(("allOf", [{"type": TYPES, "pattern": _PATTERNS[value]}], str(location / keyword)))
            elif (read_parts := _PARTS.get(keyword)) is not None:
                some = parts if keyword in _NAMING else late
                some += [
                    (kind, part, str(location / keyword)) for kind, part in read_parts(self, schema, value, location)
                ]
        self._unevaluated(schema, plain, location)
        if parts := parts + late:
            plain["parts"] = parts
        else:
            plain.pop("before", None)
        return True if plain == {"type": TYPES} else plain

    def _ahead(self, matching: list[str], others: list[str], location: Location) -> list[Plain]:
        """Texts with some patterns, and without others."""
        found: list[Plain] = [{"type": TYPES, "pattern": pattern} for pattern in matching]
        for pattern in others:
            found.append(
                any_of([{"type": TYPES - {"string"}}, _negated({"type": TYPES, "pattern": pattern}, location)])
            )
        return found

    def _types(self, schema: dict[str, Any], location: Location) -> frozenset[str]:
        given = schema.get("type")
        if given is None and "type" not in schema:
            return TYPES
        names = given if isinstance(given, list) else [given]
        types: set[str] = set()
        for name in names:
            if name == "number":
                types |= NUMBERS
            elif isinstance(name, str) and name in TYPES and name != "fraction":
                types.add(name)
            else:
                raise UnkeptError("type", str(location), f"Invalid type: {name}")
        return frozenset(types)

    def _list(self, values: Any, location: Location) -> list[Plain]:
        if not isinstance(values, list) or not values:
            raise UnkeptError(location.path[-1], str(location), "must be a list of schemas that is not empty")
        return [self._schema(value, location / index) for index, value in enumerate(values)]

    def _mapping(self, values: Any, location: Location) -> dict[str, Plain]:
        if not isinstance(values, dict):
            raise UnkeptError(location.path[-1], str(location), "must be an object of schemas")
        return {key: self._schema(value, location / key) for key, value in values.items()}

    # ------------------------------------------------------------------------------------------------ keywords

    def _const(self, _: Any, value: Any, location: Location, plain: dict[str, Any]) -> None:
        self._restrict(plain, [numbers.check_constant(value, "const", str(location))])

    def _enum(self, _: Any, value: Any, location: Location, plain: dict[str, Any]) -> None:
        if not isinstance(value, list):
            raise UnkeptError("enum", str(location), "must be a list")
        self._restrict(plain, numbers.check_constant(value, "enum", str(location)))

    def _restrict(self, plain: dict[str, Any], values: list[Any]) -> None:
        before = plain.get("enum")
        plain["enum"] = values if before is None else [one for one in before if any(is_same(one, v) for v in values)]

    def _bound(
        self, schema: dict[str, Any], value: Any, location: Location, plain: dict[str, Any], keyword: str
    ) -> None:
        exclusive = "exclusive" + keyword[0].upper() + keyword[1:]
        is_exclusive = schema.get(exclusive) is True  # as draft 4 has it
        bound = numbers.number(value, keyword, str(location))
        plain[exclusive if is_exclusive else keyword] = bound
        self.bounds.add(bound)

    def _exclusive(self, value: Any, location: Location, plain: dict[str, Any], keyword: str) -> None:
        if not isinstance(value, bool):
            plain[keyword] = numbers.number(value, keyword, str(location))
            self.bounds.add(plain[keyword])

    def _multiple(self, _: Any, value: Any, location: Location, plain: dict[str, Any]) -> None:
        if (multiple := numbers.number(value, "multipleOf", str(location))) <= 0:
            raise UnkeptError("multipleOf", str(location), f"must be above 0, not {value}")
        plain["multipleOf"] = multiple

    def _size(self, value: Any, location: Location, plain: dict[str, Any], keyword: str) -> None:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise UnkeptError(keyword, str(location), f"must be an integer of at least 0, not {value!r}")
        if value <= _MAX_SIZE:
            plain[keyword] = value
        elif keyword.startswith("min"):
            raise UnkeptError(keyword, str(location), f"must be at most {_MAX_SIZE}")

    def _pattern(self, _: Any, value: Any, location: Location, plain: dict[str, Any]) -> None:
        if not isinstance(value, str):
            raise UnkeptError("pattern", str(location), "must be a text")
        _check_pattern(value, "pattern", location)
        plain["pattern"] = value

    def _format(self, _: Any, value: Any, location: Location, plain: dict[str, Any]) -> None:
        if not isinstance(value, str):
            raise UnkeptError("format", str(location), "must be a text")
        if value in FORMATS or value in _UNKEPT_FORMATS:
            plain["format"] = value

    def _required(self, _: Any, value: Any, location: Location, plain: dict[str, Any]) -> None:
        if isinstance(value, bool):  # of a property, as draft 3 had it: it constrains nothing here
            return
        plain["required"] = _names(value, "required", location)

    def _properties(self, _: Any, value: Any, location: Location, plain: dict[str, Any]) -> None:
        plain["properties"] = self._mapping(value, location / "properties")
        numbers.check_constant(list(value), "properties", str(location))

    def _patterns(self, _: Any, value: Any, location: Location, plain: dict[str, Any]) -> None:
        plain["patternProperties"] = self._mapping(value, location / "patternProperties")
        for pattern in value:
            _check_pattern(pattern, "patternProperties", location)

    def _inner(self, value: Any, location: Location, plain: dict[str, Any], keyword: str) -> None:
        plain[keyword] = self._schema(value, location / keyword)

    def _items(self, schema: dict[str, Any], value: Any, location: Location, plain: dict[str, Any]) -> None:
        if isinstance(value, list):
            plain["prefixItems"] = [self._schema(one, location / "items" / n) for n, one in enumerate(value)]
            if "additionalItems" in schema:
                plain["items"] = self._schema(schema["additionalItems"], location / "additionalItems")
        else:
            plain["items"] = self._schema(value, location / "items")

    def _prefix(self, _: Any, value: Any, location: Location, plain: dict[str, Any]) -> None:
        plain["prefixItems"] = self._list(value, location / "prefixItems")

    def _unique(self, _: Any, value: Any, location: Location, plain: dict[str, Any]) -> None:
        if not isinstance(value, bool):
            raise UnkeptError("uniqueItems", str(location), "must be true or false")
        if value:
            plain["uniqueItems"] = True

    def _unevaluated(self, schema: dict[str, Any], plain: dict[str, Any], location: Location) -> None:
        for keyword, sibling in (("unevaluatedProperties", "additionalProperties"), ("unevaluatedItems", "items")):
            if keyword not in schema or _SINCE[keyword] > location.draft or schema[keyword] in (True, {}):
                continue
            if sibling in plain:  # then nothing is left unevaluated
                continue
            if set(schema) & _IN_PLACE or "contains" in schema:
                raise UnkeptError(
                    keyword, str(location), "is only kept without $ref, allOf, anyOf, oneOf and others beside it"
                )
            plain[sibling] = self._schema(schema[keyword], location / keyword)

    # --------------------------------------------------------------------------------------------------- parts

    def _reference(self, _: Any, value: Any, location: Location) -> list[tuple[str, Any]]:
        if not isinstance(value, str):
            raise UnkeptError("$ref", str(location), "must be a text")
        schema, target = self._document.resolve(value, location)
        number = self._numbers.get(target.path)
        if number is None:
            number = self._numbers[target.path] = len(self._numbers)
            self._waiting.append((schema, target, number))
        return [("$ref", number)]

    def _dynamic(self, _: Any, __: Any, location: Location) -> list[tuple[str, Any]]:
        raise UnkeptError("$dynamicRef", str(location), "is not supported")

    def _all(self, _: Any, value: Any, location: Location) -> list[tuple[str, Any]]:
        return [("allOf", self._list(value, location / "allOf"))]

    def _any(self, _: Any, value: Any, location: Location) -> list[tuple[str, Any]]:
        return [("anyOf", self._list(value, location / "anyOf"))]

    def _one(self, _: Any, value: Any, location: Location) -> list[tuple[str, Any]]:
        return [("oneOf", self._list(value, location / "oneOf"))]

    def _not(self, _: Any, value: Any, location: Location) -> list[tuple[str, Any]]:
        return [("not", self._schema(value, location / "not"))]

    def _if(self, schema: dict[str, Any], value: Any, location: Location) -> list[tuple[str, Any]]:
        if "then" not in schema and "else" not in schema:
            return []
        condition = self._schema(value, location / "if")
        then = self._schema(schema.get("then", True), location / "then")
        if "else" not in schema:
            return [("anyOf", [_negated(condition, location / "if"), then])]
        other = self._schema(schema["else"], location / "else")
        if "then" not in schema:
            return [("anyOf", [condition, other])]
        return [("anyOf", [all_of([condition, then]), all_of([_negated(condition, location / "if"), other])])]

    def _dependencies(self, _: Any, value: Any, location: Location) -> list[tuple[str, Any]]:
        if not isinstance(value, dict):
            raise UnkeptError("dependencies", str(location), "must be an object")
        parts: list[tuple[str, Any]] = []
        for key, needs in value.items():
            at = location / "dependencies" / key
            if isinstance(needs, list | str):
                names = _names([needs] if isinstance(needs, str) else needs, "dependencies", at)
                then: Plain = {"type": TYPES, "required": names} if names else True
            else:
                then = self._schema(needs, at)
            without: Plain = {"type": TYPES, "properties": {key: False}}
            if (either := any_of([without, then])) is not True:
                parts.append(("allOf", [either]))
        return parts


def _negated(schema: Plain, location: Location) -> Plain:
    return {"type": TYPES, "parts": [("not", schema, str(location))]}


def _check_pattern(pattern: str, keyword: str, location: Location) -> None:
    if (found := re.search(r"[\ud800-\udfff]", pattern)) is not None:
        raise UnkeptError(keyword, str(location), f"a text with U+{ord(found[0]):04X} is not supported")


def _names(value: Any, keyword: str, location: Location) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise UnkeptError(keyword, str(location), "must be a list of texts")
    numbers.check_constant(value, keyword, str(location))
    return list(dict.fromkeys(value))


_Read = Callable[[Reader, Any, Any, Location, dict[str, Any]], None]


def _bound(keyword: str) -> _Read:
    return lambda reader, schema, value, location, plain: reader._bound(schema, value, location, plain, keyword)


def _exclusive(keyword: str) -> _Read:
    return lambda reader, _, value, location, plain: reader._exclusive(value, location, plain, keyword)


def _size(keyword: str) -> _Read:
    return lambda reader, _, value, location, plain: reader._size(value, location, plain, keyword)


def _inner(keyword: str) -> _Read:
    return lambda reader, _, value, location, plain: reader._inner(value, location, plain, keyword)


_KEYWORDS: dict[str, _Read] = {
    "const": Reader._const,
    "enum": Reader._enum,
    "minimum": _bound("minimum"),
    "maximum": _bound("maximum"),
    "exclusiveMinimum": _exclusive("exclusiveMinimum"),
    "exclusiveMaximum": _exclusive("exclusiveMaximum"),
    "multipleOf": Reader._multiple,
    **{keyword: _size(keyword) for keyword in _SIZES},
    "pattern": Reader._pattern,
    "format": Reader._format,
    "required": Reader._required,
    "properties": Reader._properties,
    "patternProperties": Reader._patterns,
    "additionalProperties": _inner("additionalProperties"),
    "propertyNames": _inner("propertyNames"),
    "items": Reader._items,
    "prefixItems": Reader._prefix,
    "contains": _inner("contains"),
    "uniqueItems": Reader._unique,
}
_PARTS: dict[str, Callable[[Reader, Any, Any, Location], list[tuple[str, Any]]]] = {
    "$ref": Reader._reference,
    "$dynamicRef": Reader._dynamic,
    "$recursiveRef": Reader._dynamic,
    "allOf": Reader._all,
    "anyOf": Reader._any,
    "oneOf": Reader._one,
    "not": Reader._not,
    "if": Reader._if,
    "dependencies": Reader._dependencies,
    "dependentRequired": Reader._dependencies,
    "dependentSchemas": Reader._dependencies,
}
_IN_PLACE = frozenset(_PARTS)
_NAMING = frozenset(("$ref", "allOf", "anyOf", "oneOf"))  # those whose keys come before the keys of later `properties`
