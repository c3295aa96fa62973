"""Separates the parts of a chat model's answer as its text comes: reasoning, content, tool calls.

transformers' response parser finds where parts begin and end, by the data of `response_templates`. This module
interprets each part's text, piece by piece. A text that cannot be interpreted is content, so no answer is lost because
a model wrote a call badly.

Imported only for models whose answers have parts: transformers takes a second to load. It brings no torch along.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from tokenizers import Tokenizer as RustTokenizer
from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_parsing.content_parsers import process_field
from transformers.utils.chat_parsing.response_templates import load_response_template

from common.errors import UnavailableError
from text.answer_parts import Pieces, Reading, Spaces, ToolCallDelta, new_call_id
from text.conversation import Tools
from text.response_templates import REASONING_FIELDS, Template, reasoning_marks
from text.strict_calls import StrictCalls
from text.thought import Thought, thought_after
from text.tool_text import ArgumentsText, CallText, JsonText, ObjectsText, calls_of

CALLS_FIELD = "tool_calls"
MAX_KEPT_CHARS = 4096
PROMPT_TAIL_CHARS = 512  # of the prompt, for the beginning of the answer that the template wrote


class ModelAnswers:
    """One model's answers. Made once for each model; gives a parser to each answer."""

    def __init__(self, template: Template, rust: RustTokenizer) -> None:
        """Raises `UnavailableError` if `template`, which may come with the model, is not valid."""
        try:
            loaded = load_response_template(template)
        except (ValueError, KeyError, TypeError) as error:
            raise UnavailableError(f"the model's response_template cannot be used: {error}") from error
        self._as_written = loaded.fields
        as_text = {name: _as_text(one) for name, one in loaded.fields.items()}
        self._with_calls = replace(loaded, fields=as_text, defaults={})
        without = {name: one for name, one in as_text.items() if name != CALLS_FIELD}
        self._without_calls = replace(loaded, fields=without, defaults={})
        self.knows_calls = CALLS_FIELD in as_text
        self.knows_parts = any(one.open_re is not None for one in without.values())
        special = {i: str(token) for i, token in rust.get_added_tokens_decoder().items() if token.special}
        self.tokens = {str(token): i for i, token in rust.get_added_tokens_decoder().items()}  # ids, special or not
        self.strict = StrictCalls(template, {text: token_id for token_id, text in special.items()}, self.tokens)
        self._marks = reasoning_marks(template)
        self._shown = {
            has_calls: frozenset(
                token_id for token_id, text in special.items() if any(text in pattern for pattern in patterns)
            )
            for has_calls, patterns in ((True, _patterns(as_text)), (False, _patterns(without)))
        }

    def reading(self, prompt: str, tools: Tools, continued: str | None = None) -> Reading | None:
        """How to read the answer to `prompt`; None if the answer is plain text. `continued`: text at the end of
        `prompt` that the answer continues."""
        has_calls = self.knows_calls and bool(tools.shown)
        if not has_calls and not self.knows_parts:
            return None
        template = self._with_calls if has_calls else self._without_calls
        tail = prompt[-PROMPT_TAIL_CHARS:]
        prefix = tail if template.start_anchor_re.search(tail) else ""
        if continued and continued.strip():  # it is content, unless it has begun to reason
            thought = self.thought(prompt, continued)
            prefix = self._marks[0] if self._marks and thought is not None and not thought.open else ""
        schemas = [tool.as_json() for tool in tools.shown] if has_calls else []

        def parser(prefix: str) -> AnswerParser:
            return AnswerParser(template, self._as_written, prefix, schemas, tools)

        return Reading(
            parser=partial(parser, prefix),
            fresh_parser=partial(parser, ""),
            shown_token_ids=self._shown[has_calls],
        )

    def thought(self, prompt: str, continued: str | None = None) -> Thought | None:
        """The reasoning with which the answer to `prompt` may begin; None if it has none, or not any more. `continued`:
        see `reading`."""
        if self._marks is None:
            return None
        written = continued or ""
        tail = prompt[-PROMPT_TAIL_CHARS - len(written) :]
        is_found = self._with_calls.start_anchor_re.search(tail)
        begun = self._with_calls.truncate_past_last_anchor(tail) if is_found else written
        return thought_after(tail, begun, *self._marks)


class _Regions(ResponseParser):  # type: ignore[misc]  # transformers has no types
    """Also tells how each region was opened and what its whole text was, and drops text that is not needed any more.
    A mark inside a string of a call's JSON ends nothing."""

    _buffer: str
    _pos: int
    initial_events: list[dict[str, Any]]
    _opened_at = 0  # where in `_buffer` the open region begins, with what opened it
    _body_at = 0  # where in it its body begins
    _json: JsonText | None = None  # of the open region, if it is JSON
    _masked = ""  # `_buffer` without what is inside its strings, as far as it was read

    def __init__(self, template: Any, *, prefix: str, tools: list[dict[str, Any]], has_json_calls: bool) -> None:
        self._has_json_calls = has_json_calls
        super().__init__(template, prefix=prefix, tools=tools)

    def _consume_prefix(self, prefix: str) -> None:
        """A prompt begins no answer with calls: they are of an earlier turn, and this one's beginning was not found."""
        super()._consume_prefix(prefix)
        if any(event["field"] == CALLS_FIELD for event in self.initial_events):
            self.initial_events = []
            self._buffer, self._pos, self._json = "", 0, None
            self._reset_to_implicit()

    def feed(self, text: str) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = super().feed(text)
        if self._current != CALLS_FIELD:
            self._body = ""
            if self._pos > MAX_KEPT_CHARS:
                self._buffer = self._buffer[self._pos - 1 :]  # one character stays: a later one is not the first
                self._pos = 1
        return events

    def cast(self, value: object) -> object:
        """Arguments that a model wrote as plain text, as the tool's schema has them."""
        return self._coerce_tool_calls(value) if self._tool_params else value

    def _scan(self, watch: Any, eos: bool) -> Any:
        if self._json is None:
            return super()._scan(watch, eos)
        text = self._buffer
        self._masked += self._json.masked(text[len(self._masked) :])
        try:
            self._buffer = self._masked  # of the same length
            return super()._scan(watch, eos)
        finally:
            self._buffer = text

    def _open_explicit(self, events: list[dict[str, Any]], field: Any, m: Any) -> None:
        super()._open_explicit(events, field, m)
        self._opened_at, self._body_at = m.start(), self._pos
        if field.name == CALLS_FIELD and self._has_json_calls:
            self._json, self._masked = JsonText(), self._buffer[: self._pos]
        events[-1]["captures"] = {name: value for name, value in m.groupdict().items() if value is not None}

    def _close_current(self, events: list[dict[str, Any]]) -> None:
        body_end = self._body_at + len(self._body)
        super()._close_current(events)
        self._json = None
        if events and events[-1]["type"] == "region_close":
            events[-1]["whole"] = self._buffer[self._opened_at : self._pos]
            events[-1]["has_mark"] = self._pos > body_end  # or else the answer's end, or the next call, closed it


class AnswerParser:
    """One answer."""

    def __init__(
        self,
        template: Any,
        as_written: Mapping[str, Any],
        prefix: str,
        schemas: Sequence[dict[str, Any]],
        tools: Tools,
    ) -> None:
        self._as_written = as_written
        self._tools = tools
        self._parallel = tools.parallel
        self._pieces = Pieces()
        self._content = Spaces()
        self._reasoning = Spaces()
        self._region: _CallRegion | None = None
        self.num_calls = 0
        self.is_done = False  # the answer has all the calls that it may have
        self.is_cut = False  # it has ended inside a call
        has_json_calls = CALLS_FIELD in as_written and _is_json(as_written[CALLS_FIELD])
        self._parser = _Regions(template, prefix=prefix, tools=list(schemas), has_json_calls=has_json_calls)
        self._take(self._parser.initial_events)
        self._pieces = Pieces()  # what the template wrote is no part of the answer

    def add(self, text: str) -> Pieces:
        if text and not self.is_done:
            self._take(self._parser.feed(text))
        return self._given()

    def end(self) -> Pieces:
        """Ends the answer: gives the rest of its parts."""
        if not self.is_done:
            self._take(self._parser.finalize()[1])
        if not self.num_calls:
            self._pieces.add_text(self._content.end())
        return self._given()

    def _given(self) -> Pieces:
        if self._region is not None and not self.is_done:
            self._show_calls(self._region)
        given, self._pieces = self._pieces, Pieces()
        return given

    def _take(self, events: Sequence[Mapping[str, Any]]) -> None:
        for event in events:
            if self.is_done:
                return
            name, kind = event["field"], event["type"]
            if name == CALLS_FIELD:
                self._take_call(kind, event)
            elif name in REASONING_FIELDS:
                if kind == "region_open":
                    self._content.begin()
                    self._reasoning.begin()
                elif kind == "region_chunk":
                    self._pieces.add_text(self._reasoning.add(event["text"]), is_reasoning=True)
            elif kind == "region_chunk":
                self._pieces.add_text(self._content.add(event["text"]))

    def _take_call(self, kind: str, event: Mapping[str, Any]) -> None:
        if kind == "region_open":
            self._region = _CallRegion(self._as_written[CALLS_FIELD], event["captures"])
        elif self._region is not None and kind == "region_chunk":
            self._region.add(event["text"])
        elif self._region is not None:
            self._end_region(self._region, event["value"], event["whole"], has_mark=event["has_mark"])
            self._region = None
            if self.num_calls and not self._parallel:
                self.is_done = True

    def _show_calls(self, region: _CallRegion) -> None:
        """Shows the parts of unfinished calls that can be shown already."""
        for index, call in enumerate(region.calls):
            if call.name and not self._tools.may_call(call.name):
                return
            if index < len(region.numbers):
                if arguments := call.take():
                    self._pieces.add_call(ToolCallDelta(region.numbers[index], arguments=arguments))
            elif not (call.name and call.is_begun and self._begin(region, call)):
                return

    def _begin(self, region: _CallRegion, call: CallText) -> bool:
        """Begins a call. Returns False if the answer may not have this call."""
        if self.num_calls and not self._parallel:
            self.is_done = True
            return False
        self._content.begin()  # white space before a call is no content
        region.numbers.append(self.num_calls)
        self._pieces.add_call(ToolCallDelta(self.num_calls, new_call_id(), call.name, call.take()))
        self.num_calls += 1
        return True

    def _end_region(self, region: _CallRegion, body: str, whole: str, *, has_mark: bool) -> None:
        self._show_calls(region)
        calls = region.parsed(body, self._parser, has_mark=has_mark)
        self.is_cut = calls is None and not has_mark and region.is_open
        if calls is None:  # nothing is lost of what was not shown
            self._pieces.add_text(self._content.add(region.last_call if region.numbers else whole))
        for call in (calls or ())[len(region.numbers) :]:
            if not self._tools.may_call(call.name):  # nobody allowed such a call, so it is text
                is_alone = calls is not None and len(calls) == 1
                self._pieces.add_text(self._content.add(whole if is_alone else call.as_text()))
            elif not self._begin(region, call):
                return


class _CallRegion:
    """The text between what opens and what closes a call, or a list of calls."""

    def __init__(self, template: Any, captures: Mapping[str, str]) -> None:
        self._template = template
        self._captures = captures
        self._text = _text_of(template, captures)
        self._has_close = template.close_re is not None
        self.numbers: list[int] = []  # of the calls that were shown, in the whole answer

    @property
    def calls(self) -> Sequence[CallText]:
        return () if self._text is None else self._text.calls

    @property
    def is_open(self) -> bool:
        """Whether the answer has ended inside a call, if it ends here."""
        return self._has_close if self._text is None else self._text.is_open

    @property
    def last_call(self) -> str:
        """The text of the last call if nothing of it could be shown."""
        return "" if self._text is None else self._text.last_call

    def add(self, text: str) -> None:
        if self._text is not None:
            self._text.add(text)

    def parsed(self, body: str, parser: _Regions, *, has_mark: bool) -> list[CallText] | None:
        """All calls in `body`, by the template that came with the model; None if `body` has no valid calls. Nothing is
        assumed about what the model writes, or about what the template makes of it. JSON says itself whether it is
        whole; a call in another shape is whole if its mark has closed it."""
        if not has_mark and self._has_close and not _is_json(self._template):
            return None
        try:
            return calls_of(parser.cast(process_field(body, self._template, self._captures)))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None


def _is_json(template: Any) -> bool:
    """Whether calls are JSON as everybody writes it."""
    return template.content == "json" and not template.content_args


def _text_of(template: Any, captures: Mapping[str, str]) -> ArgumentsText | ObjectsText | None:
    """How to read a call before it is whole; None if it is JSON only in part."""
    function = template.transform.get("function") if isinstance(template.transform, Mapping) else None
    if not _is_json(template) or function is None:
        return None
    if isinstance(function, str) or template.transform_each:
        return ObjectsText()
    name = captures.get(str(function.get("name")).strip("{}"))
    return ArgumentsText(name) if name and function.get("arguments") == "{content}" else None


def _as_text(one: Any) -> Any:
    """A field whose text comes as it is, whatever is in it: reading it cannot fail."""
    return replace(
        one,
        content="text",
        content_args={"strip": False},
        transform=None,
        transform_each=False,
        repeats=True,
        join=None,
        optional=True,
    )


def _patterns(fields: Mapping[str, Any]) -> list[str]:
    """What opens and closes parts, without the marks of regular expressions: control tokens are found in it."""
    patterns = [one.open_re for one in fields.values()]
    patterns += [one.close_re for one in fields.values() if one.open_re is not None]
    return [pattern.pattern.replace("\\", "") for pattern in patterns if pattern is not None]
