"""Guided text: what an answer has to look like, and the grammar that says so to the engine.

The grammar is llguidance's: Lark, JSON schemas and regular expressions, parsed by one library at the edge (`check`) and
in the engine, so that what a router accepts is what a worker does. Its JSON schemas are exact or refused: a keyword
that cannot be kept is an error there.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import ConfigDict, Field, Strict

from common import json_schema
from common.lark_text import ascii_classes, kept_text
from common.structural_tag import Forms, quoted, structural_tag_grammar

if TYPE_CHECKING:
    from llguidance import LLParserLimits
    from llguidance._lib import JsonCompileOptions

MAX_GRAMMAR_CHARS = 64 * 2**10  # of everything that one request's grammar is made of
MAX_CHOICES = 1024
MAX_RULES = 1000  # of a Lark or EBNF grammar
MAX_REASON_CHARS = 500
MAX_LEXER_STATES = 50_000  # of one grammar, all its answers together: 1 to 2 KiB each

_JSON_OPTIONS: JsonCompileOptions = {
    # As json.dumps writes it. Free whitespace is a loop that small models do not leave.
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    # Lenient schemas would drop keywords that llguidance cannot keep, and treat oneOf as anyOf even if the two differ.
    "lenient": False,
    "coerce_one_of": False,
    # Not \\uXXXX: it would spell the name of a property a second time, as if it were another one.
    "json_allowed_escapes": 'nrbtf\\"',
}

# What llguidance's errors have in them, and what to say instead.
_LIMITS = (
    ("NoExtensionBias", "no text matches it"),
    ("ff_tokens", "it demands a text without end, or one that is far too long"),
    ("Current row has", "it costs too much to follow: more than 2000 ways to go on at one place"),
    ("Too many items", "it costs too much to follow: too many ways to read one text"),
    ("too many expressions", "it costs too much to follow: its repetitions or alternatives are too many"),
    ("precomputation failed", "it costs too much to compile"),
    ("initial_lexer_fuel", "it costs too much to compile"),
    ("recursion limit exceeded", "it is nested too deeply once its keywords are written out"),
    ("schema too large", "its schema is too large once its keywords are written out"),
    (
        "Unsatisfiable schema: Regex is empty",
        "no text matches it: its patterns, formats and lengths exclude each other",
    ),
    ("are not disjoint", "patternProperties: two of its patterns may hold for one key"),
    ("error: look-around", "a regular expression has look-around, which is not supported"),
    ("lookarounds not supported", "a regular expression has look-around or \\b, which is not supported"),
    ("error: backreferences", "a regular expression has a back-reference, which is not supported"),
    ("lexer states", "it costs too much to follow: too many states"),
)

_RULE = re.compile(r"^[ \t]*[?!]?[\w-]+(?:\.-?\d+)?(?:\[[^\]\n]*\])?[ \t]*(?:::=|:)", re.MULTILINE)

GrammarText = Annotated[str, Strict(), Field(max_length=MAX_GRAMMAR_CHARS)]


@dataclass(slots=True, frozen=True, kw_only=True)
class Guided:
    """Exactly one of these. The whole answer matches it."""

    __pydantic_config__ = ConfigDict(extra="forbid", revalidate_instances="always")

    json_schema: Annotated[GrammarText, Field(description="a JSON schema, as text")] = ""
    json_object: Annotated[bool, Strict(), Field(description="any JSON object")] = False
    regex: Annotated[GrammarText, Field(description="a regular expression, of the whole answer")] = ""
    choice: Annotated[
        tuple[Annotated[str, Strict(), Field(min_length=1, max_length=MAX_GRAMMAR_CHARS)], ...],
        Field(max_length=MAX_CHOICES, description="one of these texts"),
    ] = ()
    grammar: Annotated[GrammarText, Field(description="a context-free grammar: EBNF as llama.cpp has it, or Lark")] = ""
    structural_tag: Annotated[GrammarText, Field(description="free text with parts that have a form, as JSON")] = ""

    @property
    def kinds(self) -> list[str]:
        """Names of the fields that are set."""
        return [name for name in self.__dataclass_fields__ if getattr(self, name)]


def parser_limits() -> LLParserLimits:
    """Of one matcher, on trial and in the engine: what it may take at the beginning, and at each step."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=1_000_000,  # 20 ms of compiling
        max_grammar_size=500_000,
        step_lexer_fuel=200_000,  # 14 ms of a mask
        step_max_items=50_000,  # 2.5 ms of a mask
        max_items_in_row=2000,
        max_lexer_states=MAX_LEXER_STATES,
    )


def check_guided(guided: Guided) -> None:
    """Checks what costs nothing to check; `check_grammar` checks the rest. Raises `ValueError` with a reason."""
    kinds = guided.kinds
    if len(kinds) != 1:
        names = ", ".join(guided.__dataclass_fields__)
        raise ValueError(f"must set exactly one of {names}" + (f", not {' and '.join(kinds)}" if kinds else ""))
    if (num_chars := sum(map(len, guided.choice))) > MAX_GRAMMAR_CHARS:
        raise ValueError(f"choice must have at most {MAX_GRAMMAR_CHARS} characters in all, not {num_chars}")


def grammar_of(guided: Guided) -> str:
    """The grammar for llguidance, which has not parsed all of it yet. Raises `ValueError` with a reason."""
    try:
        return _grammar_of(guided)
    except RecursionError:  # of writing JSON: reading has a little more room
        (kind,) = guided.kinds
        raise ValueError(f"{kind} is nested too deeply") from None


def _grammar_of(guided: Guided) -> str:
    from llguidance import LLMatcher

    if guided.json_object:
        return LLMatcher.grammar_from_json_schema('{"type": "object"}', None, _JSON_OPTIONS)
    if guided.json_schema:
        schema = kept_schema(_schema(guided.json_schema), "json_schema")
        try:
            return LLMatcher.grammar_from_json_schema(json.dumps(schema), None, _JSON_OPTIONS)
        except ValueError as error:
            raise ValueError(grammar_error(guided, str(error))) from error
    if guided.regex:
        return LLMatcher.grammar_from_regex(ascii_classes(guided.regex))
    if guided.choice:
        return "start: " + " | ".join(map(quoted, guided.choice))
    if guided.structural_tag:
        return structural_tag_grammar(guided.structural_tag, Forms(_JSON_OPTIONS, kept_schema, kept_lark))
    return kept_lark(guided.grammar, "grammar")


def check_grammar(guided: Guided) -> None:
    """Parses the grammar: up to some tenths of a second, for a few MiB. Raises `ValueError` with a reason."""
    from llguidance import LLMatcher

    if error := LLMatcher.validate_grammar(grammar_of(guided)):
        raise ValueError(grammar_error(guided, error))


def grammar_error(guided: Guided, error: str) -> str:
    """What is wrong, after what the client sent."""
    (kind,) = guided.kinds
    return f"{kind} cannot be used: {failure_reason(error)}"


def failure_reason(error: str) -> str:
    """llguidance's error in one line; in other words if it names limits of its own."""
    first = " ".join(error.partition("<state>")[0].split())
    words = next((words for mark, words in _LIMITS if mark in first), first[:MAX_REASON_CHARS])
    return words.replace("Unsatisfiable schema:", "no text matches it:")


def json_text(value: object) -> str:
    """JSON of a schema or a tag, which has as many characters as the client's text: non-ASCII ones as they are."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half a surrogate pair, which only an escape can say
        return json.dumps(value)
    return text


def kept_schema(schema: object, name: str) -> dict[str, Any]:
    """A schema equal to `schema` that llguidance keeps to the letter. Raises `ValueError` with the client's `name`."""
    try:
        exact = json_schema.exact(schema)
    except json_schema.UnkeptError as error:
        raise ValueError(f"{name} cannot be used: {str(error)[:MAX_REASON_CHARS]}") from error
    if exact is False:
        raise ValueError(f"{name} cannot be used: no text matches it")
    return exact if isinstance(exact, dict) else {}


def _schema(text: str) -> object:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"json_schema is not valid JSON: {error}") from error
    if not isinstance(schema, dict | bool):
        raise ValueError("json_schema must be a JSON schema: an object, or true or false")
    if isinstance(schema, dict) and "x-guidance" in schema:
        raise ValueError("json_schema must not have x-guidance")
    return schema


def kept_lark(text: str, name: str) -> str:
    """`text` itself if it is Lark, but for `%json` schemas, and classes of ASCII; translated if it is EBNF
    (`root ::= ...`). Raises `ValueError` with the client's `name`."""
    from llguidance.gbnf_to_lark import any_to_lark

    if sum(1 for _ in _RULE.finditer(text)) > MAX_RULES:  # of which each may name all others
        raise ValueError(f"{name} cannot be used: it has more than {MAX_RULES} rules")
    if text.lstrip().startswith("{"):  # llguidance's own JSON
        raise ValueError(f"{name} cannot be parsed: it must be EBNF or Lark")
    try:
        lark = any_to_lark(text)
    except Exception as error:  # the translator raises bare Exception
        raise ValueError(f"{name} cannot be parsed: {str(error)[:MAX_REASON_CHARS]}") from error
    options = {"json_allowed_escapes": _JSON_OPTIONS["json_allowed_escapes"]}
    return kept_text(lark, lambda schema: kept_schema(schema, f"{name}: %json"), options)
