"""What a grammar accepts, and what is refused, with words that say what is wrong."""

from __future__ import annotations

import json
import sys

import pytest
from llguidance import LLMatcher, LLTokenizer

from common.guided import MAX_GRAMMAR_CHARS, Guided, check_grammar, check_guided, grammar_of
from tests.router.tiny_tokenizer import eos_id, tokenizer_files, vocab_size


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> LLTokenizer:
    file = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    file.write_bytes(tokenizer_files()["tokenizer.json"])
    return LLTokenizer(str(file), n_vocab=vocab_size(), eos_token=eos_id())


def matches(tokenizer: LLTokenizer, guided: Guided, text: str) -> bool:
    check_guided(guided)
    check_grammar(guided)
    matcher = LLMatcher(tokenizer, grammar_of(guided), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def schema(**keywords: object) -> Guided:
    return Guided(json_schema=json.dumps(keywords))


NUMBER = {"type": "number"}
NESTED = '{"not": {"anyOf": [{"type": "null"}, ' * 30 + '{"type": "string", "pattern": "a.*b"}' + "]}}" * 30
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("guided", "good", "bad"),
    [
        (Guided(regex="[ab]{2}|c/d"), ["ab", "c/d"], ["a", "abc", ""]),
        (Guided(choice=('say "x"\n', "é😀\\", "a")), ['say "x"\n', "é😀\\", "a"], ["b", "aa"]),
        (Guided(choice=tuple(map(chr, range(160)))), [chr(code) for code in (0, 1, 9, 13, 34, 92, 127, 159)], ["\xa0"]),
        (Guided(json_object=True), ["{}", '{"a": [1, null]}'], ["[]", "{", "x{}"]),
        (schema(**PERSON), ['{"name": "Jo", "age": 3}'], ['{"name": "Jo"}', '{"name": "Jo", "age": -1}']),
        (schema(**NUMBER, minimum=3, maximum=5), ["3", "4.5"], ["5.5", "2"]),
        (schema(type="string", pattern="^a+$", maxLength=2), ['"a"', '"aa"'], ['"aaa"', '"b"', "a"]),
        (schema(enum=[1, "a", None]), ["1", '"a"', "null"], ["2", "a"]),
        (schema(type="array", prefixItems=[NUMBER], items=False, minItems=1), ["[1]"], ["[]", "[1, 2]"]),
        (schema(allOf=[{**NUMBER, "minimum": 2}, {**NUMBER, "maximum": 3}]), ["2", "3"], ["1", "4"]),
        (schema(anyOf=[NUMBER, {"type": "null"}], maximum=3), ["3", "null"], ["4"]),
        (
            schema(
                **{"$ref": "#/$defs/n", "$defs": {"n": {"type": ["null", "array"], "items": {"$ref": "#/$defs/n"}}}}
            ),
            ["null", "[null, []]"],
            ["1", "[1]"],
        ),
        (Guided(grammar='root ::= "a" b\nb ::= [0-9]+'), ["a1", "a12"], ["a", "1"]),
        (Guided(grammar='start: "a" /[0-9]/'), ["a1"], ["a12"]),
    ],
)
def test_form(tokenizer: LLTokenizer, guided: Guided, good: list[str], bad: list[str]) -> None:
    for text in good:
        assert matches(tokenizer, guided, text), text
    for text in bad:
        assert not matches(tokenizer, guided, text), text


@pytest.mark.parametrize(
    ("guided", "words"),
    [
        (Guided(regex="("), "regex cannot be used: .*unclosed group"),
        (Guided(regex="(?=a)b"), "regex cannot be used: .*look-around"),
        (Guided(json_schema="{"), "json_schema is not valid JSON"),
        (Guided(json_schema="[" * 10000), "json_schema is not valid JSON"),
        (Guided(json_schema="3"), "json_schema must be a JSON schema"),
        (schema(**{"x-guidance": {"lenient": True}}, uniqueItems=True), "must not have x-guidance"),
        (schema(type="array", uniqueItems=True), "uniqueItems"),
        (schema(type="array", contains=NUMBER, minContains=3), "contains at #: is not supported with minContains"),
        (schema(**{"not": {"multipleOf": 3}}), "not at #/not: of multipleOf"),
        (schema(**{"if": {"multipleOf": 3}, "then": {"maximum": 3}}), "not at #/if: of multipleOf"),
        (schema(type="string", format="idn-hostname"), "format at #: 'idn-hostname' is not supported"),
        (schema(oneOf=[NUMBER, {"type": "integer"}]), "oneOf"),
        (schema(type="foo"), "Invalid type: foo"),
        (schema(type="string", minLength=3, pattern="^a$"), "no text matches it: its patterns"),
        (schema(type="integer", minimum=5, allOf=[{"maximum": 4}]), "no text matches it: minimum .5. is greater"),
        (Guided(regex=r"a\b"), "look-around or .b, which is not supported"),
        (Guided(regex=r"(a)\1"), "back-reference, which is not supported"),
        (Guided(json_schema=NESTED), "nested too deeply once its keywords"),
        (Guided(grammar=f"start: %json {NESTED}"), "nested too deeply once its keywords"),
        (schema(patternProperties={"^(?i:a)": {"type": "null"}, "^a": {}}), "patternProperties: two of its patterns"),
        (schema(**{"$ref": "http://example.com/s"}), "example.com"),
        (schema(**{"$ref": "#/$defs/no"}), "no"),
        (Guided(grammar='start: "a" other'), 'grammar cannot be used: .*unknown name: "other"'),
        (Guided(grammar='root ::= "a'), "grammar cannot be parsed"),
        (Guided(structural_tag="{"), "structural_tag is not valid JSON"),
    ],
)
def test_what_cannot_be_kept_is_refused(guided: Guided, words: str) -> None:
    check_guided(guided)
    with pytest.raises(ValueError, match=words) as caught:
        check_grammar(guided)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("guided", [Guided(), Guided(regex="a", json_object=True)])
def test_exactly_one_is_set(guided: Guided) -> None:
    with pytest.raises(ValueError, match="exactly one of json_schema, json_object, regex, choice"):
        check_guided(guided)


@pytest.mark.parametrize(
    "guided",
    [
        Guided(regex="(a{1,1000}){1,1000}"),
        Guided(regex="(?:a?){200}a{200}"),
        Guided(regex="(.*a.*b.*c.*){12}"),
        Guided(regex="a{1,100000000}"),
        Guided(regex="(" * (MAX_GRAMMAR_CHARS // 2) + ")" * (MAX_GRAMMAR_CHARS // 2)),
        Guided(grammar="start: " + "(" * 30000 + '"a"' + ")" * 30000),
        Guided(grammar="root ::= " + "(" * 30000 + '"a"' + ")" * 30000),
        Guided(grammar='start: start "a" | start start | "b"'),
        schema(allOf=[{"anyOf": [{"properties": {f"p{j}": {"const": i}}} for i in range(4)]} for j in range(9)]),
        schema(enum=[f"v{i}" for i in range(5000)]),
        schema(**{"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}}}),
    ],
    ids=lambda guided: str(guided)[:50],
)
def test_a_hostile_grammar_is_compiled_or_refused(tokenizer: LLTokenizer, guided: Guided) -> None:
    """Within limits that llguidance has: pytest's own time limit is what fails this test."""
    try:
        check_grammar(guided)
        matcher = LLMatcher(tokenizer, grammar_of(guided), log_level=0)
    except ValueError:
        return
    for _ in range(20):
        allowed = matcher.compute_bitmask()
        if matcher.is_error():
            return
        first = next(i for i in range(len(allowed) * 8) if allowed[i >> 3] >> (i & 7) & 1)
        if first == eos_id():
            return
        assert matcher.consume_token(first)


@pytest.mark.parametrize("step", [20, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["json_schema", "structural_tag"])
def test_schemas_of_any_depth_are_refused_by_a_reason(kind: str, step: int) -> None:
    """Also those that Python can read and not write."""
    limit = sys.getrecursionlimit()
    for depth in range(limit - 200, limit, step):
        text = '{"items":' * depth + "{}" + "}" * depth
        if kind == "structural_tag":
            text = '{"format":{"type":"json_schema","json_schema":' + text + "}}"
        with pytest.raises(ValueError, match=r"recurs|nested"):
            check_grammar(Guided(structural_tag=text) if kind == "structural_tag" else Guided(json_schema=text))


def test_schemas_that_are_true_or_false() -> None:
    check_grammar(Guided(json_schema="true"))  # any JSON
    with pytest.raises(ValueError, match="no text matches it"):
        check_grammar(Guided(json_schema="false"))
