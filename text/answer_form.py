"""The form of a chat's answer, put together of all that it may be, and what reads such an answer.

An answer is reasoning, if the model reasons, and then calls of tools or text. What has a form (the client's, a call's)
has it from the end of the reasoning on. All of it is one grammar, so an engine knows no more than of any other form.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from common.errors import InvalidArgumentError
from common.guided import MAX_GRAMMAR_CHARS, Guided, json_text
from common.sampling import FieldName
from common.structural_tag import tag_format
from text.answer_parts import PartsParser, Pieces, Reading, Spaces
from text.conversation import Json, Tools
from text.forced_calls import forced_guide, forced_reading
from text.strict_calls import StrictCalls
from text.thought import MAX_BREAKS, Thought, after_thought


@dataclass(slots=True, frozen=True, kw_only=True)
class AnswerForm:
    """What the answer to one chat may be, before anybody knows whether the client gives it a form."""

    tools: Tools
    reading: Reading | None = None  # of an answer without a form
    thought: Thought | None = None
    calls: StrictCalls | None = None  # None if the model is told of no tools
    free: Json | None = None  # the form of free text with strict calls
    tokens: Mapping[str, int] = field(default_factory=dict)  # ids by text, of those that may be marks

    def with_form(self, form: Guided | None, name: FieldName) -> tuple[Guided | None, Reading | None]:
        """(the form of the whole answer, how to read it). `form` is the client's, and is left aside if the answer has
        to be a call. Raises `InvalidArgumentError` if the two cannot be had together."""
        if self.tools.is_forced:
            return self._alone(forced_guide(self.tools), forced_reading(self.tools), name)
        if form is None:
            return (None if self.free is None else self._tag(self.free, name)), self.reading
        if self.calls is None or self.reading is None:
            return self._alone(form, self._text_reading(form), name)
        try:
            calls, openings = self.calls.calls(self.tools), self.calls.openings(self.tools)
        except ValueError as error:
            raise InvalidArgumentError(name("guided"), f"cannot be together with tools: {error}") from error
        if (own := _format(form)) is None:
            return form, None
        guided = self._tag({"type": "or", "elements": [calls, own]}, name)
        return guided, self._in_order(self.reading, self._text_reading(form), openings)

    def _alone(self, form: Guided, reading: Reading | None, name: FieldName) -> tuple[Guided, Reading | None]:
        """Nothing but reasoning comes before text of this form, which `reading` tells how to read."""
        if self.thought is None or self.reading is None or (own := _format(form)) is None:
            return form, reading
        return self._tag(own, name), self._in_order(self.reading, reading)

    def _text_reading(self, form: Guided) -> Reading | None:
        """How to read text of the client's form; None for JSON and choices, which have no room for reasoning and calls
        of their own."""
        if self.reading is None or form.json_schema or form.json_object or form.choice:
            return None
        return replace(self.reading, parser=self.reading.fresh_parser)

    def _in_order(self, whole: Reading, text: Reading | None, openings: tuple[str, ...] = ()) -> Reading:
        make_text = _PlainParser if text is None else text.parser

        def parser() -> PartsParser:
            return _FormParser(self.thought, make_text, openings, whole.fresh_parser)

        return Reading(parser=parser, fresh_parser=parser, shown_token_ids=whole.shown_token_ids)

    def _tag(self, format_: Json, name: FieldName) -> Guided:
        if self.thought is not None:
            format_ = after_thought(self.thought, format_, self.tokens)
        text = json_text({"type": "structural_tag", "format": format_})
        if len(text) > MAX_GRAMMAR_CHARS:
            reason = f"the form of the whole answer has {len(text)} characters, more than {MAX_GRAMMAR_CHARS}"
            raise InvalidArgumentError(name("guided"), reason)
        return Guided(structural_tag=text)


def _format(form: Guided) -> Json | None:
    """The same form as a part of a structural tag; None if it is wrong, which its own check finds, too."""
    try:
        if form.json_schema:
            return {"type": "json_schema", "json_schema": json.loads(form.json_schema)}
        if form.structural_tag:
            return dict(tag_format(form.structural_tag))
    except (ValueError, RecursionError):
        return None
    if form.json_object:
        return {"type": "json_schema", "json_schema": {"type": "object"}}
    if form.regex:
        return {"type": "regex", "pattern": form.regex}
    if form.choice:
        return {"type": "or", "elements": [{"type": "const_string", "value": text} for text in form.choice]}
    return {"type": "grammar", "grammar": form.grammar}


class _PlainParser:
    """An answer that is nothing but text."""

    num_calls = 0
    is_done = is_cut = False

    def add(self, text: str) -> Pieces:
        pieces = Pieces()
        pieces.add_text(text)
        return pieces

    def end(self) -> Pieces:
        return Pieces()


class _FormParser:
    """Reads one answer that has a form: reasoning up to its mark, whatever is in it, and then what the first characters
    tell: calls or text."""

    def __init__(
        self,
        thought: Thought | None,
        text: Callable[[], PartsParser],
        openings: tuple[str, ...],
        calls: Callable[[], PartsParser],
    ) -> None:
        self._thought = thought  # that may still come, or is being read
        self._is_open = thought is not None and not thought.open
        self._breaks_left = 0  # line breaks that may still come after the reasoning
        self._text, self._openings, self._calls = text, openings, calls
        self._reasoning = Spaces()
        self._reasoning.begin()
        self._held = ""
        self._answer: PartsParser | None = None
        self.num_calls = 0
        self.is_done = self.is_cut = False

    def add(self, text: str) -> Pieces:
        pieces = Pieces()
        if self._answer is None:
            self._held += text
            self._begin(pieces)
            text = ""
        if self._answer is not None:
            held, self._held = self._held, ""
            pieces.extend(self._answer.add(held + text))
            self.num_calls, self.is_done = self._answer.num_calls, self._answer.is_done
        return pieces

    def end(self) -> Pieces:
        pieces = Pieces()
        if self._is_open:
            pieces.add_text(self._reasoning.add(self._held), is_reasoning=True)
            return pieces
        if self._answer is None:
            self._answer = self._text()
            pieces.extend(self._answer.add(self._held))
        pieces.extend(self._answer.end())
        self.num_calls, self.is_cut = self._answer.num_calls, self._answer.is_cut
        return pieces

    def _begin(self, pieces: Pieces) -> None:
        """Reads reasoning. Sets `_answer` as soon as it is known what follows; `_held` is then its beginning."""
        if self._thought is not None and not self._is_open:
            if self._held.startswith(self._thought.open):
                self._held = self._held.removeprefix(self._thought.open)
                self._is_open = True
            elif self._thought.open.startswith(self._held):
                return
            else:
                self._thought = None
        if self._thought is not None:
            reasoning, mark, rest = self._held.partition(self._thought.close)
            if not mark:
                num = _num_begun(reasoning, self._thought.close)
                reasoning, rest = reasoning[: len(reasoning) - num], reasoning[len(reasoning) - num :]
            self._held = rest
            pieces.add_text(self._reasoning.add(reasoning), is_reasoning=True)
            if not mark:
                return
            self._thought, self._is_open, self._breaks_left = None, False, MAX_BREAKS
        while self._breaks_left and self._held.startswith("\n"):
            self._held = self._held[1:]
            self._breaks_left -= 1
        if self._breaks_left and not self._held:
            return
        if any(self._held.startswith(one) for one in self._openings):
            self._answer = self._calls()
        elif not any(one.startswith(self._held) for one in self._openings):
            self._answer = self._text()


def _num_begun(text: str, mark: str) -> int:
    """With how many of its last characters `text` may begin `mark`."""
    return next((num for num in range(min(len(mark) - 1, len(text)), 0, -1) if mark.startswith(text[-num:])), 0)
