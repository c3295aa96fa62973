"""Sixty JSON schemas of the kinds that the JSON Schema Test Suite has: nested, enums, patterns, arrays, unions, refs.

What a model could make long without end is bounded, as docs/guided.md says.
"""

from __future__ import annotations

from collections.abc import Iterator

Schema = dict[str, object]

WORD: Schema = {"type": "string", "maxLength": 12}
AGE: Schema = {"type": "integer", "minimum": 0, "maximum": 120}
FLAG: Schema = {"type": "boolean"}


def record(*optional: str, **properties: object) -> Schema:
    """An object whose properties are all required but for `optional`."""
    return {
        "type": "object",
        "properties": properties,
        "required": [name for name in properties if name not in optional],
        "additionalProperties": False,
    }


def array(items: object, least: int = 0, most: int = 3) -> Schema:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def text(**keywords: object) -> Schema:
    return {"type": "string", **keywords}


def at_depth(depth: int, child: Schema) -> Schema:
    """What `child` of the object that lies so deep in a tree has to be. It bounds a schema that refers to itself."""
    return {"properties": {"child": child if depth == 0 else at_depth(depth - 1, child)}}


def schemas() -> list[Schema]:
    return [*_scalars(), *_objects(), *_arrays(), *_unions(), *_refs()]


def _scalars() -> Iterator[Schema]:
    yield from (AGE, FLAG, WORD)
    yield {"type": "null"}
    for constant in ("fixed", {"a": [1, None]}):
        yield {"const": constant}
    yield {"enum": ["red", "green", "blue"]}
    yield {"enum": [1, "two", None, False, {"three": 3}]}
    yield {"type": "integer", "exclusiveMinimum": -5, "exclusiveMaximum": 5, "multipleOf": 2}
    yield {"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.25}
    for pattern in (
        "^[A-Z]{3}-[0-9]{4}$",
        "^(cat|dog)s?$",
        "^[a-f0-9]{8}$",
        r"^\d{1,3}(\.\d{1,3}){3}$",
        "^#[0-9a-fA-F]{6}$",
    ):
        yield text(pattern=pattern)
    for format_ in ("date", "uuid", "time", "ipv4"):
        yield text(format=format_)
    yield text(minLength=3, maxLength=6)


def _objects() -> Iterator[Schema]:
    yield record(name=WORD, age=AGE)
    yield record("nick", name=WORD, nick=WORD)
    yield record("a", "b", "c", a=AGE, b=FLAG, c=WORD)
    yield record(outer=record(middle=record(inner=AGE)))
    yield record(kind={"enum": ["a", "b"]}, value={"anyOf": [AGE, WORD]})
    yield record(id=text(pattern="^[a-z]{2}[0-9]{2}$"), born=text(format="date"), tags=array({"enum": ["x", "y", "z"]}))
    yield record(size={"type": "number", "minimum": 0, "maximum": 9.5, "multipleOf": 0.5})
    yield {"type": "object", "patternProperties": {"^[xyz]$": AGE}, "additionalProperties": False, "maxProperties": 2}
    yield record(**{"with space": AGE, 'quo"te': FLAG, "ünï": {"type": "null"}})
    yield {**record(a=AGE), "title": "A", "description": "annotated", "examples": [{"a": 1}]}
    yield {"allOf": [record(a=AGE), {"required": ["a"]}]}
    yield record(city=WORD, position=record(lat={"type": "integer", "minimum": -90, "maximum": 90}, north=FLAG))
    yield record(items=array(record(sku=text(pattern="^[A-Z]{2}$"), count=AGE), 1, 2), paid=FLAG)


def _arrays() -> Iterator[Schema]:
    yield array(AGE)
    yield array(WORD, 1, 2)
    yield array({"enum": ["a", "b"]}, 2, 4)
    yield array(array(AGE, 1, 2), 1, 2)
    yield {"type": "array", "prefixItems": [AGE, WORD, FLAG], "items": False, "minItems": 3}
    yield {"type": "array", "prefixItems": [WORD], "items": AGE, "minItems": 1, "maxItems": 3}
    yield array(record(x=AGE, y=AGE), 1, 2)
    yield array({"type": ["integer", "null"], "minimum": 0, "maximum": 9}, 1, 5)
    yield array({"anyOf": [FLAG, {"type": "null"}]}, 1, 4)


def _unions() -> Iterator[Schema]:
    yield {"anyOf": [AGE, WORD]}
    yield {"type": ["boolean", "null", "integer"], "minimum": 0, "maximum": 5}
    yield {"anyOf": [record(a=AGE), record(b=WORD)]}
    yield {"oneOf": [{"type": "null"}, record(a=AGE)]}
    yield record(shape={"oneOf": [record(kind={"const": "circle"}, r=AGE), record(kind={"const": "square"}, side=AGE)]})
    yield array({"anyOf": [record(n=AGE), {"enum": ["none", "all"]}]}, 1, 2)
    yield {"anyOf": [AGE, {"type": "null"}], "maximum": 50}
    yield record(answer={"anyOf": [{"const": "yes"}, {"const": "no"}, {"const": None}]})
    yield record("error", ok=FLAG, error={"type": ["string", "null"], "maxLength": 10})


def _refs() -> Iterator[Schema]:
    yield {**record(a={"$ref": "#/$defs/age"}), "$defs": {"age": AGE}}
    yield {**record(a={"$ref": "#/definitions/p"}, b={"$ref": "#/definitions/p"}), "definitions": {"p": record(x=AGE)}}
    yield {"$ref": "#/$defs/pair", "$defs": {"pair": array({"$ref": "#/$defs/age"}, 2, 2), "age": AGE}}
    yield {"$ref": "#/$defs/age", "maximum": 7, "$defs": {"age": AGE}}
    tree = record("child", value=AGE, child={"anyOf": [{"type": "null"}, {"$ref": "#/$defs/tree"}]})
    yield {"$ref": "#/$defs/tree", "$defs": {"tree": tree}, **at_depth(2, {"type": "null"})}
    person = record("boss", name=WORD, boss={"$ref": "#/$defs/title"})
    yield {"$ref": "#/$defs/person", "$defs": {"person": person, "title": {"enum": ["Dr", "Prof"]}}}
    yield record(a={"allOf": [{"$ref": "#/$defs/low"}, {"maximum": 9}]}) | {
        "$defs": {"low": {"type": "integer", "minimum": 3}}
    }
    yield {"$defs": {"list": {"anyOf": [{"type": "null"}, record(head=AGE)]}}, **array({"$ref": "#/$defs/list"}, 1, 2)}
    yield {**record(m={"$ref": "#/properties/n"}, n=AGE)}
