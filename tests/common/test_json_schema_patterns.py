"""Patterns with and without others: the texts are those that Python's `re` finds."""

from __future__ import annotations

import itertools
import re

import pytest

from common.json_schema.patterns import UnreadError, has_match, lookaheads, texts

TEXTS = ["".join(chars) for num in range(5) for chars in itertools.product("abc\n", repeat=num)]
PATTERNS = [
    *("", "a", "^a", "a$", "^$", "$^", "^$|b", "^(a|bc)*$", "(^a|b$)", "^[^a]b", "a{2,3}", "^(a{0,2}b){2}$"),
    *("^a.b$", "^(?:a|)b??$", "^(ab|a)(c|bcd)*$", "(a$|b)+", "[a-b]{2}", r"\s", r"^\S\n$", r"\x61\u0062", "a|^b$"),
]


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("way", ["matching", "others", "beside b", "without b"])
def test_the_same_texts_as_re(pattern: str, way: str) -> None:
    matching = {"matching": [pattern], "others": [], "beside b": [pattern, "b"], "without b": [pattern]}[way]
    others = {"matching": [], "others": [pattern], "beside b": [], "without b": ["b"]}[way]
    found = texts(frozenset(matching), frozenset(others))
    for text in TEXTS:
        is_match = all(_finds(one, text) for one in matching) and not any(_finds(one, text) for one in others)
        assert is_match == (found is not None and _finds(_for_re(found), text)), (text, found)
        assert has_match(pattern, text) == _finds(pattern, text), text


def _finds(pattern: str, text: str) -> bool:
    return re.search(pattern.replace("$", r"\Z"), text) is not None


def _for_re(pattern: str) -> str:
    return re.sub(r"\\u\{([0-9a-f]+)\}", lambda found: re.escape(chr(int(found[1], 16))), pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        *("(?=a)", "(?<n>a)", r"(a)\1", r"\b", r"\p{L}", "a**", "[b-a]", "[a&&b]", "[[a]", "[]a]", "(a", "a)", "[a"),
        *("a{3,1}", "a{", "*", "(?:.{90}a|.{80}b)*c.{90}", r"\x4", "(((a{99}){99}){99}){99}"),
    ],
)
def test_what_is_not_read(pattern: str) -> None:
    with pytest.raises(UnreadError):
        texts(frozenset(), frozenset({pattern}))


@pytest.mark.parametrize(
    ("pattern", "patterns"),
    [
        ("^(?=a(b|c))x", (["^x", "^(?:a(b|c))"], [])),
        (r"^(?!\()(?=[)])x$", (["^x$", "^(?:[)])"], [r"^(?:\()"])),
        ("^(?!a)b|c", None),
        ("^(?!a)*b", None),
        ("(?!a)b", None),
        ("^a", None),
    ],
)
def test_lookaheads_become_patterns(pattern: str, patterns: tuple[list[str], list[str]] | None) -> None:
    assert lookaheads(pattern) == patterns
