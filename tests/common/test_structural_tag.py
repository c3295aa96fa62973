"""Structural tags become grammars that accept what the tags say."""

from __future__ import annotations

import json

import pytest
from llguidance import LLMatcher, LLTokenizer

from common.guided import Guided, check_grammar, grammar_of
from tests.common.test_guided import matches, tokenizer
from tests.router.tiny_tokenizer import eos_id

__all__ = ["tokenizer"]

CALL = {
    "begin": "<call>",
    "content": {
        "type": "json_schema",
        "json_schema": {"type": "object", "properties": {"a": {"type": "number"}}, "required": ["a"],
                        "additionalProperties": False},
    },
    "end": "</call>",
}  # fmt: skip
CONST = {"type": "const_string", "value": "b"}
OTHER = {"begin": "<other>", "content": {"type": "any_text"}, "end": "</other>"}
GOOD = '<call>{"a": 1}</call>'
ANY = {"type": "any_text"}
ENDLESS: list[dict[str, object]] = [  # text that follows one of these would be taken for more of it
    {"type": "sequence", "elements": [CONST, ANY]},
    {"type": "or", "elements": [ANY, CONST]},
    {"type": "optional", "content": ANY},
    {"type": "plus", "content": {"type": "sequence", "elements": [CONST, ANY]}},
    {"type": "tag", "begin": "<x>", "content": {"type": "sequence", "elements": [CONST, ANY]}, "end": ""},
    {"type": "triggered_tags", "triggers": ["<c"], "tags": [CALL]},
]


def of(**format_: object) -> Guided:
    return Guided(structural_tag=json.dumps({"type": "structural_tag", "format": format_}))


def triggered(**flags: object) -> Guided:
    return of(type="triggered_tags", triggers=["<call", "<other"], tags=[CALL, OTHER], **flags)


def separated(**flags: object) -> Guided:
    return of(type="tags_with_separator", separator="\n", tags=[{**CALL, "type": "tag"}, OTHER], **flags)


OLDER = Guided(
    structural_tag=json.dumps(
        {
            "type": "structural_tag",
            "structures": [{"begin": "<call>", "schema": CALL["content"]["json_schema"], "end": "</call>"}],  # type: ignore[index]
            "triggers": ["<call"],
        }
    )
)


@pytest.mark.parametrize(
    ("guided", "good", "bad"),
    [
        (triggered(), ["", "hi", f"hi {GOOD} and {GOOD} bye", "<other>x</other>", "<cal"], ["<call>"]),
        (triggered(at_least_one=True), [GOOD, f"{GOOD} and {GOOD} bye"], ["hi", "", f"hi {GOOD}"]),
        (triggered(stop_after_first=True), ["hi", f"hi {GOOD}"], [f"{GOOD} bye"]),
        (triggered(stop_after_first=True, at_least_one=True), [GOOD], ["hi", f"{GOOD}{GOOD}"]),
        (OLDER, ["hi", f"hi {GOOD} bye"], ["<call>1</call>"]),
        (separated(), ["", GOOD, f"{GOOD}\n<other>any < text</other>\n{GOOD}"], ["hi", f"{GOOD}{GOOD}"]),
        (separated(at_least_one=True), [GOOD], [""]),
        (separated(stop_after_first=True, at_least_one=True), [GOOD], [f"{GOOD}\n{GOOD}"]),
        (
            of(type="sequence", elements=[{"type": "regex", "pattern": "[a/]{2}"}, {"type": "any_text"}]),
            ["a/", "aa anything"],
            ["a"],
        ),
        (
            of(
                type="sequence",
                elements=[
                    {"type": "const_string", "value": 'x"\n'},
                    {"type": "or", "elements": [{"type": "const_string", "value": value} for value in "12"]},
                    {"type": "optional", "content": {"type": "const_string", "value": "?"}},
                    {"type": "plus", "content": {"type": "grammar", "grammar": "root ::= [0-9]"}},
                    {"type": "star", "content": {"type": "const_string", "value": "!"}},
                ],
            ),
            ['x"\n1?3', 'x"\n24!!'],
            ['x"\n3', 'x"\n1?'],
        ),
    ],
)  # fmt: skip
def test_form(tokenizer: LLTokenizer, guided: Guided, good: list[str], bad: list[str]) -> None:
    for text in good:
        assert matches(tokenizer, guided, text), text
    for text in bad:
        assert not matches(tokenizer, guided, text), text


def test_special_tokens_begin_and_end_tags(tokenizer: LLTokenizer) -> None:
    special = {"type": "token", "token": 1}
    guided = of(
        type="triggered_tags",
        triggers=["<never"],
        tags=[{**CALL, "begin": special}, {**OTHER, "begin": "<never>"}],
    )
    matcher = LLMatcher(tokenizer, grammar_of(guided), log_level=0)
    assert matcher.consume_tokens([*tokenizer.tokenize_str("hi "), 1, *tokenizer.tokenize_str('{"a": 1}</call>')])
    assert matcher.is_accepting()
    assert eos_id() != 1


@pytest.mark.parametrize(
    ("guided", "words"),
    [
        (of(type="magic"), "structural_tag.format.type must be one of const_string"),
        (of(type="const_string", value=3), "structural_tag.format.value must be a text"),
        (of(type="const_string", value="a", more=1), "structural_tag.format.more is not supported"),
        (of(type="triggered_tags", triggers=["<x"], tags=[CALL]), "tags\\[0\\].begin must start with one"),
        (of(type="triggered_tags", triggers=["<c", "<x"], tags=[CALL]), "no tag begins with '<x'"),
        (of(type="tag", begin="<a>", content={"type": "any_text"}, end=""), "format.end must be a text"),
        (of(type="sequence", elements=[{"type": "any_text"}, {"type": "any_text"}]), "elements\\[0\\]: free text"),
        *((of(type="sequence", elements=[each, CONST]), "elements\\[0\\]: free text") for each in ENDLESS),
        *((of(type="tag", begin="<a>", content=each, end="</a>"), "format.content: free text") for each in ENDLESS),
        (of(type="json_schema", json_schema={"type": "array", "uniqueItems": True}), "uniqueItems"),
        (of(type="json_schema", json_schema={}, style="qwen_xml"), 'style must be "json"'),
        (of(type="token", token="x"), "format.token must be"),
        (Guided(structural_tag='{"type": "structural_tag", "format": 3}'), "structural_tag.format must be an object"),
        (Guided(structural_tag='{"format": {}, "extra": 1}'), "structural_tag.extra is not supported"),
    ],
)  # fmt: skip
def test_refused(guided: Guided, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_grammar(guided)


def test_free_text_may_end_what_a_special_token_ends(tokenizer: LLTokenizer) -> None:
    guided = of(type="tag", begin="<a>", content=ENDLESS[0], end={"type": "token", "token": 1})
    matcher = LLMatcher(tokenizer, grammar_of(guided), log_level=0)
    assert matcher.consume_tokens([*tokenizer.tokenize_str("<a>bhi "), 1])
    assert matcher.is_accepting()


def test_nesting_is_bounded() -> None:
    format_: dict[str, object] = {"type": "const_string", "value": "a"}
    for _ in range(40):
        format_ = {"type": "optional", "content": format_}
    with pytest.raises(ValueError, match="nested more than 18 deep"):
        check_grammar(of(**format_))
