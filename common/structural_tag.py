"""Structural tags: free text in which some parts have a form, as an answer with tool calls is.

The JSON is that of vLLM's and xgrammar's structural tags, both the older shape (`structures`, `triggers`) and the newer
(`format`); docs/guided.md lists what of them is served. It becomes a Lark grammar for llguidance, whose lazy lexemes
end free text at the first trigger.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeGuard, cast

from common.lark_text import ascii_classes

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_DEPTH = 18

_TEXT = r"/(.|\n)*/"

JsonObject = Mapping[str, object]


@dataclass(slots=True, frozen=True)
class Forms:
    """Of parts of a tag. Both functions take the client's name for a part, and raise `ValueError` with it."""

    json_options: JsonCompileOptions
    schema: Callable[[object, str], dict[str, object]]  # one that llguidance keeps to the letter
    lark: Callable[[str, str], str]  # of Lark or EBNF


def structural_tag_grammar(text: str, forms: Forms) -> str:
    """Raises `ValueError` with a reason that names the place."""
    return _Grammar(forms).of(tag_format(text))


def tag_format(text: str) -> JsonObject:
    """The tag's format, in the newer shape. Raises `ValueError` with a reason that names the place."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"structural_tag is not valid JSON: {error}") from error
    tag = _object(value, "structural_tag")
    if "structures" in tag:
        _only(tag, "structural_tag", "type", "structures", "triggers")
        format_ = _from_older(tag)
    else:
        _only(tag, "structural_tag", "type", "format")
        format_ = _object(tag.get("format"), "structural_tag.format")
    if tag.get("type", "structural_tag") != "structural_tag":
        raise ValueError('structural_tag.type must be "structural_tag"')
    return format_


class _Grammar:
    """Rules collected on the way through one tag. Expressions are Lark; each place is named as in the client's JSON."""

    def __init__(self, forms: Forms) -> None:
        self._forms = forms
        self._rules: list[str] = []
        self._parts: list[dict[str, str]] = []  # whole grammars inside this one
        self._formats: dict[str, Callable[[JsonObject, str, int], str]] = {
            "const_string": self._const_string,
            "json_schema": self._json_schema,
            "any_text": self._any_text,
            "regex": self._regex,
            "grammar": self._grammar,
            "token": self._token,
            "sequence": self._sequence,
            "or": self._or,
            "optional": self._repeated("?"),
            "star": self._repeated("*"),
            "plus": self._repeated("+"),
            "tag": self._tag,
            "mark": self._mark,
            "text_until": self._text_until,
            "triggered_tags": self._triggered_tags,
            "tags_with_separator": self._tags_with_separator,
        }

    def of(self, format_: JsonObject) -> str:
        start = self._expression(format_, "structural_tag.format", 0)
        lark = "\n".join(["%llguidance {}", f"start: {start}", *self._rules]) + "\n"
        if not self._parts:
            return lark
        return json.dumps({"grammars": [{"name": "tags", "lark_grammar": lark}, *self._parts]})

    def _expression(self, format_: JsonObject, place: str, depth: int) -> str:
        if depth > MAX_DEPTH:
            raise ValueError(f"{place} is nested more than {MAX_DEPTH} deep")
        kind = format_.get("type")
        if not isinstance(kind, str) or kind not in self._formats:
            raise ValueError(f"{place}.type must be one of {', '.join(self._formats)}, not {kind!r}")
        return self._formats[kind](format_, place, depth)

    def _rule(self, body: str, attribute: str = "") -> str:
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{attribute}: {body}")
        return name

    # -------------------------------------------------------------------------------------------- single parts

    def _const_string(self, format_: JsonObject, place: str, _: int) -> str:
        _only(format_, place, "type", "value")
        return quoted(_text(format_, "value", place))

    def _json_schema(self, format_: JsonObject, place: str, _: int) -> str:
        _only(format_, place, "type", "json_schema", "style")
        if format_.get("style", "json") != "json":
            raise ValueError(f'{place}.style must be "json"')
        schema = format_.get("json_schema")
        if schema is False or not isinstance(schema, dict | bool):
            raise ValueError(f"{place}.json_schema must be a JSON schema that something matches")
        if isinstance(schema, dict) and "x-guidance" in schema:
            raise ValueError(f"{place}.json_schema must not have x-guidance")
        given = self._forms.schema(schema, f"{place}.json_schema")
        return self._rule("%json " + json.dumps({**given, "x-guidance": self._forms.json_options}))

    def _any_text(self, format_: JsonObject, place: str, _: int) -> str:
        """Free text is allowed at the very end, or before a tag's end (`_tag`): otherwise nothing says where it
        stops."""
        _only(format_, place, "type")
        return self._rule(_TEXT)

    def _mark(self, format_: JsonObject, place: str, _: int) -> str:
        """A text that is nothing else wherever it may stand, spelled or as its one token: a lazy lexeme ends all others
        that begin like it. A `const_string` gives way to longer text."""
        text, token = _mark(format_, place)
        return f"({self._rule(text, '[lazy]')}{token and f' | {token}'})"

    def _text_until(self, format_: JsonObject, place: str, _: int) -> str:
        """Free text up to its end, and the end."""
        _only(format_, place, "type", "end")
        return "(" + self._inside({"content": {"type": "any_text"}, "end": format_.get("end")}, place, 0) + ")"

    def _regex(self, format_: JsonObject, place: str, _: int) -> str:
        from llguidance import LLMatcher

        _only(format_, place, "type", "pattern")
        grammar = json.loads(LLMatcher.grammar_from_regex(ascii_classes(_text(format_, "pattern", place))))
        return self._part(grammar["grammars"][0]["lark_grammar"])

    def _grammar(self, format_: JsonObject, place: str, _: int) -> str:
        _only(format_, place, "type", "grammar")
        return self._part(self._forms.lark(_text(format_, "grammar", place), f"{place}.grammar"))

    def _part(self, lark: str) -> str:
        name = f"part{len(self._parts)}"
        self._parts.append({"name": name, "lark_grammar": lark})
        return f"@{name}"

    def _token(self, format_: JsonObject, place: str, _: int) -> str:
        _only(format_, place, "type", "token")
        return _token(format_.get("token"), f"{place}.token")

    # ------------------------------------------------------------------------------------------------- several

    def _sequence(self, format_: JsonObject, place: str, depth: int) -> str:
        _only(format_, place, "type", "elements")
        elements = _objects(format_, "elements", place)
        expressions = self._all(elements, f"{place}.elements", depth)
        for index, element in enumerate(elements[:-1]):
            if _may_end_in_free_text(element):
                raise ValueError(f"{place}.elements[{index}]: free text may only come last, or before a tag's end")
        return "(" + " ".join(expressions) + ")"

    def _or(self, format_: JsonObject, place: str, depth: int) -> str:
        _only(format_, place, "type", "elements")
        return "(" + " | ".join(self._all(_objects(format_, "elements", place), f"{place}.elements", depth)) + ")"

    def _repeated(self, times: str) -> Callable[[JsonObject, str, int], str]:
        def repeated(format_: JsonObject, place: str, depth: int) -> str:
            _only(format_, place, "type", "content")
            content = _object(format_.get("content"), f"{place}.content")
            return f"({self._expression(content, f'{place}.content', depth + 1)}){times}"

        return repeated

    def _all(self, formats: Sequence[JsonObject], place: str, depth: int) -> list[str]:
        return [self._expression(one, f"{place}[{index}]", depth + 1) for index, one in enumerate(formats)]

    # ---------------------------------------------------------------------------------------------------- tags

    def _tag(self, format_: JsonObject, place: str, depth: int) -> str:
        begin = format_.get("begin")
        first = self._mark(begin, f"{place}.begin", depth) if _is_mark(begin) else _begin(format_, place)
        return f"({first} {self._inside(format_, place, depth)})"

    def _inside(self, tag: JsonObject, place: str, depth: int) -> str:
        """A tag's content and its end."""
        _only(tag, place, "type", "begin", "content", "end")
        content = _object(tag.get("content"), f"{place}.content")
        end = tag.get("end", "")
        if content.get("type") != "any_text":
            expression = f"{self._expression(content, f'{place}.content', depth + 1)} {_end(end, place)}"
            if isinstance(end, str) and end and _may_end_in_free_text(content):
                raise ValueError(f"{place}.content: free text before a tag's end has to be all of its content")
            return expression
        _only(content, f"{place}.content", "type")
        if _is_mark(end):
            text, token = _mark(end, f"{place}.end")
            spelled = self._rule(_TEXT, f"[suffix={text}]")
            return f"({spelled} | {self._rule(_TEXT)} {token})" if token else spelled
        if isinstance(end, dict):
            return f"{self._rule(_TEXT)} {_end(end, place)}"
        if not isinstance(end, str) or not end:
            raise ValueError(f"{place}.end must be a text: free text goes on until it")
        return self._rule(_TEXT, f"[suffix={quoted(end)}]")

    def _triggered_tags(self, format_: JsonObject, place: str, depth: int) -> str:
        """Free text; as soon as it has a trigger, one of the tags that begin with it."""
        _only(format_, place, "type", "triggers", "tags", "at_least_one", "stop_after_first")
        triggers = format_.get("triggers")
        tags = _objects(format_, "tags", place)
        needs_some = any(isinstance(tag.get("begin"), str) for tag in tags)
        if not isinstance(triggers, list) or not all(isinstance(one, str) and one for one in triggers):
            raise ValueError(f"{place}.triggers must be a list of texts")
        if needs_some and not triggers:
            raise ValueError(f"{place}.triggers must not be empty: a tag begins with a text")
        at_least_one, stop_after_first = (
            _flag(format_, "at_least_one", place),
            _flag(format_, "stop_after_first", place),
        )
        first, later = [], []
        by_trigger: dict[str, list[str]] = {}
        by_mark: dict[tuple[str, str], list[str]] = {}
        for index, tag in enumerate(tags):
            where = f"{place}.tags[{index}]"
            inside = self._rule(self._inside(tag, where, depth))
            begin = tag.get("begin")
            if _is_mark(begin):
                first.append(f"{self._mark(begin, f'{where}.begin', depth)} {inside}")
                by_mark.setdefault(_mark(begin, f"{where}.begin"), []).append(inside)
                continue
            first.append(f"{_begin(tag, where)} {inside}")
            if not isinstance(begin, str):
                later.append(f"{self._rule(_TEXT)} {_begin(tag, where)} {inside}")
                continue
            trigger = next((one for one in triggers if begin.startswith(one)), None)
            if trigger is None:
                raise ValueError(f"{where}.begin must start with one of the triggers")
            by_trigger.setdefault(trigger, []).append(f"{quoted(begin[len(trigger) :])} {inside}")
        if unused := [one for one in triggers if one not in by_trigger]:
            raise ValueError(f"{place}.triggers: no tag begins with {unused[0]!r}")
        for trigger, rests in by_trigger.items():
            text = self._rule(_TEXT.strip() + " " + quoted(trigger), "[lazy]")
            later.append(f"{text} ({' | '.join(rests)})")
        for (spelled, token), insides in by_mark.items():
            text = self._rule(f"{_TEXT} {spelled}", "[lazy]")
            later.append(f"({text}{token and f' | {self._rule(_TEXT)} {token}'}) ({' | '.join(insides)})")
        one_later = self._rule(" | ".join(later))
        if at_least_one:
            one_first = self._rule(" | ".join(first))
            return one_first if stop_after_first else f"({one_first} {one_later}* {self._rule(_TEXT)})"
        text = self._rule(_TEXT)
        return f"({text} | {one_later})" if stop_after_first else f"({one_later}* {text})"

    def _tags_with_separator(self, format_: JsonObject, place: str, depth: int) -> str:
        _only(format_, place, "type", "tags", "separator", "at_least_one", "stop_after_first")
        tag = "(" + " | ".join(self._all(_tags(format_, place), f"{place}.tags", depth)) + ")"
        separator = quoted(_text(format_, "separator", place, may_be_empty=True))
        some = tag if _flag(format_, "stop_after_first", place) else f"{tag} ({separator} {tag})*"
        return f"({some})" if _flag(format_, "at_least_one", place) else f"({some})?"


def _from_older(tag: JsonObject) -> JsonObject:
    structures = _objects(tag, "structures", "structural_tag")
    tags = []
    for index, one in enumerate(structures):
        place = f"structural_tag.structures[{index}]"
        _only(one, place, "begin", "schema", "end")
        content = {"type": "json_schema", "json_schema": one.get("schema", {})}
        tags.append({"begin": _text(one, "begin", place), "content": content, "end": one.get("end", "")})
    return {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags}


def _may_end_in_free_text(format_: JsonObject) -> bool:
    """Whether free text may be the last part of a format that was checked. Only a special token ends it there: any text
    that is meant to follow would be taken for more of it."""
    match format_["type"]:
        case "any_text" | "triggered_tags":
            return True
        case "sequence":
            return _may_end_in_free_text(_objects(format_, "elements", "")[-1])
        case "or":
            return any(map(_may_end_in_free_text, _objects(format_, "elements", "")))
        case "optional" | "star" | "plus":
            return _may_end_in_free_text(_object(format_["content"], ""))
        case "tag":
            return not format_.get("end", "") and _may_end_in_free_text(_object(format_["content"], ""))
        case "tags_with_separator":
            return any(map(_may_end_in_free_text, _tags(format_, "")))
    return False


def _tags(format_: JsonObject, place: str) -> list[JsonObject]:
    return [{**tag, "type": "tag"} for tag in _objects(format_, "tags", place)]


def _begin(tag: JsonObject, place: str) -> str:
    begin = tag.get("begin")
    if isinstance(begin, dict):
        _only(begin, f"{place}.begin", "type", "token")
        return _token(begin.get("token"), f"{place}.begin.token")
    return quoted(_text(tag, "begin", place))


def _is_mark(value: object) -> TypeGuard[JsonObject]:
    return isinstance(value, dict) and value.get("type") == "mark"


def _mark(mark: JsonObject, place: str) -> tuple[str, str]:
    """(its text, quoted; the token that it may also be, empty if it is none)."""
    _only(mark, place, "type", "value", "token")
    token = mark.get("token")
    return quoted(_text(mark, "value", place)), "" if token is None else _token(token, f"{place}.token")


def _end(end: object, place: str) -> str:
    if _is_mark(end):
        text, token = _mark(end, f"{place}.end")
        return f"({text}{token and f' | {token}'})"
    if isinstance(end, dict):
        _only(end, f"{place}.end", "type", "token")
        return _token(end.get("token"), f"{place}.end.token")
    if not isinstance(end, str):
        raise ValueError(f"{place}.end must be a text")
    return quoted(end)


def _token(token: object, place: str) -> str:
    """A special token: its id, or its text if that is in angle brackets."""
    if isinstance(token, int) and not isinstance(token, bool) and token >= 0:
        return f"<[{token}]>"
    if (
        isinstance(token, str)
        and token.startswith("<")
        and token.endswith(">")
        and not set(token[1:-1]) & set("<>[] \n")
    ):
        return token
    raise ValueError(f"{place} must be a token's id, or the text of a special token in angle brackets")


def quoted(text: str) -> str:
    """`text` quoted for Lark: as in JSON, but with the delete character escaped."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _only(given: JsonObject, place: str, *names: str) -> None:
    if unknown := sorted(set(given) - set(names)):
        raise ValueError(f"{place}.{unknown[0]} is not supported")


def _object(value: object, place: str) -> JsonObject:
    if not isinstance(value, dict):
        raise ValueError(f"{place} must be an object")
    return value


def _objects(format_: JsonObject, name: str, place: str) -> list[JsonObject]:
    values = format_.get(name)
    if not isinstance(values, list) or not values:
        raise ValueError(f"{place}.{name} must be a list of objects that is not empty")
    return [_object(value, f"{place}.{name}[{index}]") for index, value in enumerate(cast("list[object]", values))]


def _text(format_: JsonObject, name: str, place: str, *, may_be_empty: bool = False) -> str:
    value = format_.get(name)
    if not isinstance(value, str) or not (value or may_be_empty):
        raise ValueError(f"{place}.{name} must be a text")
    return value


def _flag(format_: JsonObject, name: str, place: str) -> bool:
    value = format_.get(name, False)
    if not isinstance(value, bool):
        raise ValueError(f"{place}.{name} must be true or false")
    return value
