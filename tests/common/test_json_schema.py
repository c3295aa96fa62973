"""JSON schemas as people write them: kept to the letter, or refused by keyword and pointer."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from common.guided import Guided, check_grammar, grammar_of
from tests.examples import examples

BYTES = LLTokenizer("byte")


def matcher_of(guided: Guided) -> LLMatcher:
    check_grammar(guided)
    matcher = LLMatcher(BYTES, grammar_of(guided), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def takes(matcher: LLMatcher, text: str) -> bool:
    matcher, tokens = matcher.deep_copy(), list(text.encode())
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


def takes_some_order(matcher: LLMatcher, value: object, text: str) -> bool:
    return takes(matcher, text) or any(takes(matcher, json.dumps(one)) for one in _orders(value))


def of(schema: object) -> Guided:
    return Guided(json_schema=json.dumps(schema))


TAGGED = [
    {"type": "object", "properties": {"kind": {"const": kind}, "x": {"type": type_}}, "required": ["kind", "x"]}
    for kind, type_ in (("cat", "integer"), ("dog", "string"))
]
CLOSED = {"type": "object", "additionalProperties": False}
A, B, AB = '{"a": 1}', '{"b": 1}', '{"a": 1, "b": 1}'
ONE_OF_TWO = [{"required": ["a"]}, {"required": ["b"]}]
MAP = {"type": "object", "additionalProperties": {"type": "boolean"}}


each_way = pytest.mark.parametrize(  # all of which come to the same compiler
    "way", ["json_schema", *(pytest.param(way, marks=pytest.mark.slow) for way in ("structural_tag", "lark"))]
)


@pytest.mark.parametrize("way", ["structural_tag", "lark"])
def test_schemas_in_tags_and_grammars_are_kept_and_refused_too(way: str) -> None:
    test_kept_to_the_letter({"oneOf": TAGGED}, ['{"kind": "cat", "x": 1}'], ['{"kind": "cat", "x": "a"}'], way)
    test_kept_to_the_letter({"type": "object", "oneOf": ONE_OF_TWO}, [A, B], [AB, "{}"], way)
    test_kept_to_the_letter({"type": "number", "minimum": -(2**63)}, ["0.5"], ["-9223372036854775809"], way)
    test_refused_by_keyword_and_pointer({"type": "integer", "multipleOf": 9999991}, "multipleOf at #", way)


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        # oneOf
        (
            {"oneOf": [{"$ref": "#/$defs/s"}, {"type": "null"}], "$defs": {"s": {"type": "string"}}},
            ["null", '"a"'],
            ["1"],
        ),
        ({"oneOf": TAGGED}, ['{"kind": "cat", "x": 1}', '{"kind": "dog", "x": "a"}'], ['{"kind": "cat", "x": "a"}']),
        ({"oneOf": ONE_OF_TWO, "type": "object"}, [A, B], [AB, "{}"]),
        ({"oneOf": [{**CLOSED, "properties": {"a": {}}}, {**CLOSED, "properties": {"b": {}}}]}, [A, B], [AB, "{}"]),
        ({"oneOf": [{"type": "integer", "maximum": 3}, {"type": "integer", "minimum": 3}]}, ["2", "4"], ["3"]),
        ({"oneOf": [{"pattern": "^a"}, {"pattern": "^b"}], "type": "string"}, ['"a"', '"bc"'], ['"c"']),
        ({"oneOf": [{"enum": ["a", "b"]}, {"enum": ["b", "c"]}]}, ['"a"', '"c"'], ['"b"']),
        ({"oneOf": [{"type": "string"}]}, ['"a"'], ["1"]),
        ({"oneOf": [{"pattern": "a"}, {"pattern": "b"}], "type": "string"}, ['"a"', '"bc"'], ['"ab"', '"c"']),
        (
            {"oneOf": [{"type": "string", "pattern": "^[0-9a-f]{8}$"}, {"type": "string"}]},
            ['"0123456"', '"x"'],
            ['"0123abcd"'],
        ),
        ({"oneOf": [{"format": "hostname"}, {"format": "ipv4"}], "type": "string"}, ['"a.b"'], ['"1.2.3.4"', '"_"']),
        (
            {"oneOf": [{"items": {"type": "string"}}, {"items": {"type": "object"}}], "type": "array"},
            ['["a", "b"]', "[{}]"],
            ["[]", "[1]", '["a", {}]'],
        ),
        ({"oneOf": [{"enum": ["a"]}, {"pattern": "^#"}], "type": "string"}, ['"a"', '"#1"'], ['"b"']),
        # Numbers that are no integers are left out of the second branch, which has others.
        (
            {
                "type": "object",
                "oneOf": [
                    {"required": ["a"], "properties": {"a": {"type": "integer"}}},
                    {"required": ["a"], "properties": {"a": {"type": ["number", "null"]}}},
                ],
            },
            ['{"a": null}'],
            [A, "{}"],
        ),
        # formats that nobody defined, and some that a pattern says
        ({"type": "string", "format": "weird"}, ['"a"'], ["1"]),
        ({"type": "string", "format": "json-pointer"}, ['"/a~0/b"', '""'], ['"a"', '"/~2"']),
        ({"type": "string", "format": "uri-reference"}, ['"/a?b#c"', '"http://x.y/z"', '"a/b:c"'], ['"a b"', '":a"']),
        (
            {"type": "string", "format": "regex"},
            ['"^a(?:b|[^c-])+?[0-9]{2,}$"', r'"\\d\\.(x(?=y))*"', '"a{1,3}|"'],
            ['"("', '"[z-a]"', '"a**"', '"a{3,1}"', r'"\\q"', '"*a"'],
        ),
        (
            {"type": "string", "format": "date"},
            ['"2024-02-29"', '"2000-02-29"', '"2023-02-28"', '"1999-12-31"'],
            ['"2023-02-29"', '"1900-02-29"', '"2024-02-30"', '"2024-04-31"', '"2024-13-01"', '"2024-00-10"'],
        ),
        (
            {"type": "string", "format": "date-time"},
            ['"2024-02-29T12:00:00Z"', '"2016-12-31T23:59:60Z"', '"2023-01-31t01:02:03.5+01:30"'],
            ['"1900-02-29T12:00:00Z"', '"2024-01-01T24:00:00Z"', '"2024-01-01"', '"2024-01-01T12:00:60Z"'],
        ),
        (
            {"type": "string", "format": "time"},
            ['"23:59:60Z"', '"12:00:59Z"', '"00:00:00.25-08:00"', '"23:59:60.5+00:00"'],
            ['"12:00:60Z"', '"24:00:00Z"', '"12:60:00Z"', '"12:00:00"', '"23:59:60-08:00"'],
        ),
        ({"type": "string", "format": "idn-email"}, ['"jürgen@例.jp"', '"a.b@c.de"'], ['"a"', '"a@b@c"', '"a b@c"']),
        ({"type": "string", "format": "iri"}, ['"http://例.jp/ä?ö#ü"', '"urn:a"'], ['"/ä"', '"http://a b"']),
        ({"type": "string", "format": "iri-reference"}, ['"/ä"', '"ä/b:c"', '"#ü"'], ['"a b"', '"ä:b"', '"<ä>"']),
        (
            {"type": "string", "format": "uri-template"},
            ['"/a{?b,c*}{/d:3}%20"'],
            ['"/{a"', '"/a b"', '"{a:0}"', '"{}"'],
        ),
        # not
        ({"not": {"type": "null"}}, ["1", '"a"', "[]"], ["null"]),
        ({"type": "string", "not": {"enum": ["ab", "é"]}}, ['"a"', '"abc"', '""', '"e"'], ['"ab"', '"é"']),
        ({"type": "integer", "not": {"const": 3}}, ["2", "4"], ["3"]),
        ({"enum": [1, 2, None], "not": {"enum": [2]}}, ["1", "null"], ["2"]),
        ({"type": "object", "not": {"required": ["a", "b"]}}, [A, B, "{}"], [AB]),
        ({"anyOf": [{"not": {}}, {"type": "null"}]}, ["null"], ["1"]),
        ({"type": "string", "not": {"pattern": "a+b"}}, ['"a"', '"ba"', '""'], ['"ab"', '"xaaby"']),
        ({"type": "string", "not": {"pattern": "^$"}}, ['"a"', '" "'], ['""']),
        (
            {"type": "string", "pattern": "^[a-c]*$", "not": {"pattern": "^.{2}$|bb"}},
            ['"abc"', '"b"'],
            ['"ab"', '"abb"'],
        ),
        ({"type": "string", "not": {"format": "ipv4"}}, ['"1.2.3"', '"1.2.3.256"'], ['"1.2.3.4"']),
        ({"type": "array", "not": {"const": [1, "a"]}}, ["[]", "[1]", '[1, "b"]', '[1, "a", 2]'], ['[1, "a"]']),
        ({"type": "object", "not": {"enum": [{}, {"a": 1}]}}, [B, AB, '{"a": 2}'], ["{}", A]),
        ({"type": "object", "not": {"propertyNames": False}}, [A], ["{}"]),
        ({"type": "object", "not": {"propertyNames": {"not": {"enum": ["a", "c"]}}}}, [A, AB], [B, "{}"]),
        ({"type": "object", "not": {"propertyNames": {"enum": ["a"]}}}, [B, AB], [A, "{}"]),
        ({"type": "object", "not": {**CLOSED, "properties": {"a": {}}}}, [B, AB], [A, "{}"]),
        (
            {**CLOSED, "properties": {"a": {}, "b": {}}, "not": {"patternProperties": {"^a": {"type": "string"}}}},
            [A, AB],
            [B, "{}", '{"a": "x"}'],
        ),
        ({"type": "object", "not": {"oneOf": ONE_OF_TWO}}, [AB, "{}"], [A, B]),
        (
            {"type": "array", "maxItems": 2, "not": {"items": {"type": "boolean"}}},
            ['["a"]', '[true, "a"]'],
            ["[]", "[true, false]"],
        ),
        # patterns
        ({"type": "string", "pattern": "^(?=.*[0-9])(?!x)[a-z0-9]+$"}, ['"a1"', '"1"'], ['"a"', '"x1"', '"1A"']),
        ({"type": "string", "pattern": "^((a|b)(-|$))+$"}, ['"a-b"', '"a-"'], ['"ab"', '""']),
        (
            {"type": "object", "patternProperties": {"a": {"type": "integer"}, "b": {"minimum": 3}}},
            ['{"a": 1, "ab": 3, "b": 4.5, "c": null}'],
            ['{"ab": 1}', '{"ab": 3.5}', '{"a": 1.5}', '{"b": 1}'],
        ),
        # keys that depend on keys
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, [B, AB, "{}"], [A]),
        ({"type": "object", "dependencies": {"a": ["b"], "c": {"required": ["a"]}}}, [B, AB], [A, '{"c": 1}']),
        ({"type": "object", "dependentSchemas": {"a": {"maxProperties": 1}}}, [A, B], ['{"a": 1, "x": 1}']),
        # if
        (
            {
                "type": "object",
                "if": {"properties": {"a": {"const": 1}}, "required": ["a"]},
                "then": {"required": ["b"]},
            },
            [AB, '{"a": 2}', "{}"],
            [A],
        ),
        (
            {"if": {"type": "string"}, "then": {"maxLength": 1}, "else": {"type": "null"}},
            ['"a"', "null"],
            ['"ab"', "1"],
        ),
        # counts of keys
        ({**CLOSED, "properties": {"a": {}, "b": {}, "c": {}}, "minProperties": 2}, [AB], [A, "{}"]),
        ({**CLOSED, "properties": {"a": {}, "b": {}, "c": {}}, "maxProperties": 1}, [A, "{}"], [AB]),
        ({"type": "object", "properties": {"a": {}}, "minProperties": 1}, [A, '{"x": 1}'], ["{}"]),
        ({**MAP, "minProperties": 1, "maxProperties": 1}, ['{"x": false}'], ["{}", '{"x": false, "y": false}']),
        ({**CLOSED, "properties": {"a": {}}, "propertyNames": {"enum": ["a"]}}, [A, "{}"], [B]),
        ({**MAP, "propertyNames": {"pattern": "^x"}}, ['{"x1": true}'], ['{"y": true}']),
        # arrays
        ({"type": "array", "items": {"enum": [1, 2, 3]}, "uniqueItems": True}, ["[3, 1]", "[]"], ["[1, 1]"]),
        ({"type": "array", "uniqueItems": True, "maxItems": 1}, ["[1]"], ["[1, 1]"]),
        ({"type": "array", "uniqueItems": False}, ["[1, 1]"], ["1"]),
        ({"type": "array", "contains": {"const": 1}, "maxItems": 2}, ["[1]", "[2, 1]"], ["[]", "[2, 2]"]),
        ({"type": "array", "contains": {"const": 1}}, ["[1]", "[2, 2, 1, 2]"], ["[]", "[2, 2]"]),
        (
            {"type": "array", "items": [{"type": "null"}], "additionalItems": False},
            ["[null]", "[]"],
            ["[1]", "[null, 1]"],
        ),
        # references
        ({"$ref": "#here", "$defs": {"x": {"$anchor": "here", "type": "null"}}}, ["null"], ["1"]),
        (
            {
                "$id": "https://example.com/a/root",
                "$ref": "other",
                "$defs": {"x": {"$id": "other", "$ref": "#/$defs/y", "$defs": {"y": {"type": "null"}}}},
            },
            ["null"],
            ["1"],
        ),
        (
            {
                "$schema": "http://json-schema.org/draft-04/schema#",
                "id": "http://x/",
                "$ref": "#a",
                "definitions": {"a": {"id": "#a", "type": "null"}},
            },
            ["null"],
            ["1"],
        ),
        (
            {
                "$ref": "#/$defs/t",
                "$defs": {
                    "t": {"type": "object", "properties": {"t": {"$ref": "#/$defs/t", "type": "object", "title": "t"}}}
                },
            },
            ['{"t": {"t": {}}}'],
            ['{"t": 1}'],
        ),
        ({"const": {"$ref": "#/nowhere", "$id": "x"}}, ['{"$ref": "#/nowhere", "$id": "x"}'], ["{}"]),
        # A name that is spelled with an escape is the same name.
        (
            {"properties": {"a": {"type": "integer"}}, "type": "object"},
            [A],
            ['{"a": 1, "\\u0061": "x"}', '{"\\u0061": "x"}'],
        ),
        ({"type": "object", "patternProperties": {"^a": {"type": "integer"}}}, [A, '{"b": "x"}'], ['{"\\u0061": "x"}']),
        # numbers
        (
            {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 0.5},
            ["0.1", "0.4999"],
            ["0", "0.0", "-0", "0.5"],
        ),
        ({"type": "number", "exclusiveMinimum": 5, "maximum": 5.5}, ["5.5", "5.0001"], ["5", "5.0"]),
        ({"type": "number", "allOf": [{"exclusiveMinimum": 5}, {"maximum": 5.5}]}, ["5.5"], ["5"]),
        ({"type": "number", "minimum": -0.5, "exclusiveMaximum": 0}, ["-0.5", "-0.1"], ["0", "-0"]),
        ({"type": "number", "minimum": 5, "exclusiveMinimum": True, "maximum": 5.5}, ["5.2"], ["5"]),
        ({"type": "number", "exclusiveMaximum": 1}, ["0.99", "-3"], ["1", "1.0"]),
        (
            {"enum": [9007199254740992, -9007199254740992]},
            ["9007199254740992", "-9007199254740992"],
            ["9007199254740993"],
        ),
        ({"const": "\b\f\n\r\t\x80é"}, [json.dumps("\b\f\n\r\t\x80é", ensure_ascii=False)], ['""']),
        (
            {"type": "array", "items": {"type": "string", "maxLength": 2**32}, "maxItems": 2**70},
            ['["a"]', "[]"],
            ["[1]"],
        ),
        ({"type": "string", "pattern": r"^[(?=]\\b[\]\\]$"}, [json.dumps("?\\b]")], ['"a"']),
        ({"const": 1152921504606846976}, ["1152921504606846976"], ["1152921504606846977"]),
        (
            {"type": "integer", "minimum": 0, "maximum": 9223372036854775807},
            ["9223372036854775807"],
            ["9223372036854775808"],
        ),
        (
            {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
            ["-9223372036854774784", "0", "9223372036854775807"],
            ["-9223372036854775809", "9223372036854775808"],
        ),
        ({"type": "number", "minimum": -(2**63)}, ["-9223372036854774784", "0.5"], ["-9223372036854775809"]),
    ],
    ids=lambda value: json.dumps(value)[:60],
)
@each_way
def test_kept_to_the_letter(schema: dict[str, Any], good: list[str], bad: list[str], way: str) -> None:
    matcher = matcher_of(_by(way, schema))
    assert [text for text in good if not takes_some_order(matcher, json.loads(text), text)] == []
    assert [text for text in bad if takes(matcher, text)] == []


def _by(way: str, schema: object) -> Guided:
    if way == "structural_tag":
        format_ = {"type": "json_schema", "json_schema": schema}
        return Guided(structural_tag=json.dumps({"type": "structural_tag", "format": format_}))
    if way == "lark":
        spaces = {"x-guidance": {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}}
        assert isinstance(schema, dict)
        return Guided(grammar=f'// "%json" in a comment\nstart: %json {json.dumps({**schema, **spaces})}')
    return of(schema)


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"enum": [1234567890123456789]}, "enum at #: 1234567890123456789 is a number that cannot be kept exactly"),
        ({"properties": {"a": {"const": [2**53 + 1]}}}, "const at #/properties/a: 9007199254740993"),
        ({"const": "a\u0001b"}, "const at #: a text with U[+]0001 is not supported"),
        ({"items": {"enum": ["a", {"b": ["\x7f"]}]}}, "enum at #/items: a text with U[+]007F"),
        ({"const": {"\0": 1}}, "const at #: a text with U[+]0000"),
        ({"properties": {"a\x1fb": True}}, "properties at #: a text with U[+]001F"),
        ({"required": ["\x0b"]}, "required at #: a text with U[+]000B"),
        ({"dependentRequired": {"a": ["\x0e"]}}, "dependencies at #/.*: a text with U[+]000E"),
        ({"const": "\ud800"}, "const at #: a text with U[+]D800"),
        ({"properties": {"a": {"pattern": "^(?=a)\udfff"}}}, "pattern at #/properties/a: a text with U[+]DFFF"),
        ({"patternProperties": {"\ud800": {}}}, "patternProperties at #: a text with U[+]D800"),
        ({"type": "string", "minLength": 2**32}, "minLength at #: must be at most 4294967295"),
        ({"items": {"minItems": 10**20}}, "minItems at #/items: must be at most"),
        ({"items": {"pattern": "a(?=b)c"}}, "pattern at #/items: look-around ..... is not supported in 'a"),
        ({"pattern": "[(?=](?<!b)c"}, "pattern at #: look-around"),
        ({"pattern": r"\bfoo"}, "pattern at #: look-around"),
        ({"patternProperties": {r"(a)\1": {}, "b": {}}}, "patternProperties at #: a back-reference"),
        ({"const": -(2**63)}, "const at #: -9223372036854775808"),
        ({"type": "integer", "minimum": 2**63, "maximum": 2**63 + 1}, "minimum at #: 9223372036854775808"),
        ({"type": "integer", "minimum": -1e30, "maximum": -1e29}, "minimum at #: -1e[+]30"),
        ({"type": "integer", "minimum": 2**53 + 1}, "minimum at #: 9007199254740993"),
        ({"type": "number", "maximum": 0.9999999999999999}, "maximum at #: 0.9999999999999999 cannot be kept"),
        ({"multipleOf": -3}, "multipleOf at #: must be above 0, not -3"),
        ({"multipleOf": 0}, "multipleOf at #: must be above 0"),
        ({"allOf": [{"multipleOf": 65537}, {"multipleOf": 65539}]}, "multipleOf at #: the values"),
        ({**MAP, "minProperties": 2, "maxProperties": 2}, "minProperties at #: keys .* may repeat"),
        ({"properties": {"a~/b": {"uniqueItems": True}}}, "uniqueItems at #/properties/a~0~1b"),
        ({"type": "array", "contains": {}, "minContains": 2}, "contains at #: .*minContains"),
        (
            {"oneOf": [{"type": "number"}, {"type": "integer"}]},
            "oneOf at #/oneOf: two of its branches may hold at once",
        ),
        ({"oneOf": [{"format": "uri"}, {"pattern": "a"}]}, "oneOf at #/oneOf: two of its branches may hold at once"),
        ({"not": {"pattern": "(a)\\1"}}, "not at #/not: of pattern it is not supported if that has the escape"),
        ({"not": {"pattern": "a.{900}b"}}, "not at #/not: of pattern it is not supported if that"),
        ({"not": {"items": {"type": "null"}}}, "not at #/not: of items it is only supported with maxItems"),
        (
            {"patternProperties": {f"{n}": {"maximum": n} for n in range(6)}},
            "patternProperties at #: is only supported with 4 patterns that overlap",
        ),
        ({"unevaluatedProperties": False, "allOf": [True]}, "unevaluatedProperties at #"),
        ({"$dynamicRef": "#a"}, "dynamicRef at #"),
        ({"$ref": "other.json"}, "ref at #: 'other.json' is not in this schema"),
        ({"$ref": "#nowhere"}, "ref at #: there is no anchor 'nowhere'"),
        ({"$ref": "#/a/b"}, "ref at #: '#/a/b' leads nowhere"),
        ({"items": 3}, "schema at #/items: must be an object"),
        ({"type": "string", "format": "idn-hostname"}, "format at #: 'idn-hostname'"),
        ({"not": {}}, "no text matches it"),
        (
            {
                "type": "object",
                "minProperties": 15,
                "maxProperties": 16,
                "properties": {f"p{n}": {} for n in range(30)},
            },
            "Properties at #",
        ),
    ],
    ids=lambda value: json.dumps(value)[:60],
)
@each_way
def test_refused_by_keyword_and_pointer(schema: dict[str, Any], words: str, way: str) -> None:
    place = {
        "json_schema": "json_schema",
        "structural_tag": "structural_tag.format.json_schema",
        "lark": "grammar: %json",
    }
    with pytest.raises(ValueError, match=f"{place[way]} cannot be used: .*{words}"):
        check_grammar(_by(way, schema))


def test_llguidances_own_json_is_no_grammar() -> None:
    with pytest.raises(ValueError, match="must be EBNF or Lark"):
        check_grammar(Guided(grammar=json.dumps({"grammars": [{"json_schema": {"const": 1}}]})))


ASCII = r"\d+[\w.]\\d\D"


def _tag(kind: str, **fields: str) -> Guided:
    return Guided(structural_tag=json.dumps({"type": "structural_tag", "format": {"type": kind, **fields}}))


@pytest.mark.parametrize(
    "guided",
    [
        Guided(regex=ASCII),
        _tag("regex", pattern=ASCII),
        Guided(grammar=f"start: /{ASCII}/"),
        Guided(grammar=f'start: "" A // /\nA: /\\d+/ "" /{ASCII[3:]}/'),
        _tag("grammar", grammar=f"start: /{ASCII}/"),
    ],
    ids=["regex", "tag of a regex", "lark", "lark with a comment", "tag of lark"],
)
def test_classes_of_regular_expressions_are_those_of_ascii(guided: Guided) -> None:
    matcher = matcher_of(guided)
    assert takes(matcher, "12_\\d٣")
    assert takes(matcher, "12.\\dx")
    assert not takes(matcher, "٣_\\dx")
    assert not takes(matcher, "1é\\dx")


def test_a_regular_expression_of_two_lines_has_classes_of_ascii() -> None:
    matcher = matcher_of(Guided(grammar="start: /a\n\\d/"))
    assert takes(matcher, "a\n1")
    assert not takes(matcher, "a\n٣")


BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
BOUND = st.one_of(
    st.integers(-12, 12), st.integers(-120, 120).map(lambda one: one / 10), st.sampled_from([1e-7, 0.001])
)


@settings(max_examples=examples(150))
@given(
    st.lists(st.tuples(st.sampled_from(BOUNDS), BOUND), min_size=1, max_size=3), st.sampled_from(["number", "integer"])
)
def test_no_number_outside_its_bounds(bounds: list[tuple[str, float]], type_: str) -> None:
    try:
        matcher = matcher_of(of({"type": type_, "allOf": [dict([bound]) for bound in bounds]}))
    except ValueError:
        return
    near = {Decimal(repr(bound)) + Decimal(step) for _, bound in bounds for step in ("0", "1", "-1", "1e-3", "-1e-3")}
    for number in near | {Decimal(0)}:
        for text in (
            format(number, "f"),
            format(number, "f") + "0" * ("." in format(number, "f")),
            f"-{abs(number):f}",
        ):
            assert not takes(matcher, text) or all(_is_within(Decimal(text), *bound) for bound in bounds), text


def _is_within(value: Decimal, keyword: str, bound: float) -> bool:
    match keyword:
        case "minimum":
            return value >= Decimal(repr(bound))
        case "maximum":
            return value <= Decimal(repr(bound))
        case "exclusiveMinimum":
            return value > Decimal(repr(bound))
    return value < Decimal(repr(bound))


VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 3, 0.5, -0.5, "", "a", "b", "abc", [], [1], [1, 1], [1, "a"], [True, False], {}),
    *(
        {"a": 1},
        {"b": 1},
        {"a": 1, "b": 2},
        {"a": "a"},
        {"a": "b", "b": 1},
        {"c": True},
        {"a": None, "b": None, "c": 0},
    ),
    *({"kind": "x", "a": 1}, {"kind": "y"}, {"a": {"a": 1}}, {"b": [1]}),
]
NAMES = st.sampled_from(["a", "b", "c", "kind"])
TYPE_NAMES = ["null", "boolean", "integer", "number", "string", "array", "object"]


def _schemas(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    some = st.lists(inner, min_size=1, max_size=3)
    keywords: dict[str, st.SearchStrategy[Any]] = {
        "type": st.one_of(st.sampled_from(TYPE_NAMES), st.just(["string", "null"])),
        "enum": st.lists(st.sampled_from(VALUES), min_size=1, max_size=3),
        "const": st.sampled_from(VALUES),
        **dict.fromkeys(BOUNDS, st.sampled_from([0, 1, -1, 0.5, 5.5])),
        **{f"{end}{of}": st.integers(0, 3) for end in ("min", "max") for of in ("Length", "Items", "Properties")},
        "pattern": st.sampled_from(["^a", "b$", "a|b", "^$"]),
        **dict.fromkeys(("items", "contains", "additionalProperties", "not", "if", "then", "else"), inner),
        **dict.fromkeys(("prefixItems", "allOf", "anyOf", "oneOf"), some),
        "uniqueItems": st.just(True),
        "required": st.lists(NAMES, min_size=1, max_size=2, unique=True),
        "properties": st.dictionaries(NAMES, inner, min_size=1, max_size=3),
        "patternProperties": st.dictionaries(st.sampled_from(["a", "^[bc]$", "[a-c]"]), inner, min_size=1, max_size=2),
        "propertyNames": st.sampled_from([{"enum": ["a", "b"]}, {"pattern": "^[ab]$"}, {"maxLength": 2}, True, False]),
        "dependentRequired": st.dictionaries(NAMES, st.lists(NAMES, max_size=1), max_size=1),
        "dependentSchemas": st.dictionaries(NAMES, inner, max_size=1),
        "multipleOf": st.sampled_from([1, 2, 0.5]),
        "$ref": st.sampled_from(["#/$defs/A", "#/$defs/B"]),
    }
    names = st.lists(st.sampled_from(sorted(keywords)), min_size=1, max_size=4, unique=True)
    return names.flatmap(lambda chosen: st.fixed_dictionaries({name: keywords[name] for name in chosen}))


SCHEMAS = st.recursive(
    st.sampled_from([True, False, {}, *({"type": name} for name in TYPE_NAMES)]), _schemas, max_leaves=8
)


@settings(max_examples=examples(150), suppress_health_check=list(HealthCheck))
@given(_schemas(SCHEMAS), SCHEMAS, SCHEMAS)
def test_what_is_accepted_is_valid_and_what_is_valid_is_accepted(schema: dict[str, Any], a: Any, b: Any) -> None:
    """Or the schema is refused. Of branches of oneOf that overlap, some of what is valid may be left out."""
    schema["$defs"] = {"A": a, "B": b}
    try:
        matcher = matcher_of(of(schema))
    except ValueError:
        return
    validator = jsonschema.Draft202012Validator(schema)
    for value in VALUES:
        try:
            is_valid = validator.is_valid(value)
        except RecursionError:  # a reference to itself, which has no meaning
            return
        accepted = any(takes(matcher, json.dumps(one)) for one in _orders(value))
        assert accepted == is_valid or (is_valid and '"oneOf"' in json.dumps(schema)), value


def _orders(value: Any) -> Iterator[Any]:
    if not isinstance(value, dict):
        yield value
        return
    for keys in itertools.permutations(value):
        yield {key: value[key] for key in keys}
