"""Reads the text of a model's tool calls as it comes, so that a client sees a call's arguments before the call is
complete."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

NAME_KEY = "name"
ARGUMENT_KEYS = ("arguments", "parameters")


@dataclass(slots=True)
class CallText:
    """One call, as far as it has come."""

    name: str = ""
    arguments: list[str] = field(default_factory=list)  # pieces of JSON text that nobody took yet
    is_begun: bool = False  # arguments are an object's text, so that they can be shown as they come

    def as_text(self) -> str:
        return json.dumps({NAME_KEY: self.name, ARGUMENT_KEYS[0]: "".join(self.arguments)}, ensure_ascii=False)

    def take(self) -> str:
        taken = "".join(self.arguments)
        self.arguments.clear()
        return taken


class JsonText:
    """Where in a JSON text its strings are, and whether it is whole. A text that is no JSON is followed as far as that
    goes: a string never has a raw line break or another control character, so a quote that nobody closed ends there."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_text = self._is_escaped = False

    @property
    def is_open(self) -> bool:
        """Whether an object, a list or a string has begun that has not ended."""
        return self._depth > 0 or self._in_text

    def masked(self, text: str) -> str:
        """The next piece of the text, with what is inside strings replaced: what is left is of the JSON itself."""
        masked = []
        for char in text:
            if not self._in_text:
                self._in_text = char == '"'
                self._depth += (char in "{[") - (char in "}]" and self._depth > 0)
            elif self._is_escaped:
                self._is_escaped, char = False, _MASK
            elif char == '"' or char < " ":
                self._in_text = False
            else:
                self._is_escaped, char = char == "\\", _MASK
            masked.append(char)
        return "".join(masked)


_MASK = "\ue000"  # no mark of any model has it


class ArgumentsText:
    """A text that is one call's arguments and nothing else; the name is known."""

    def __init__(self, name: str) -> None:
        self.calls = [CallText(name)]
        self._spaces = ""
        self._json = JsonText()

    @property
    def is_open(self) -> bool:
        """Whether the text has ended inside the call, if it ends here."""
        return self._json.is_open or not self.calls[0].is_begun

    @property
    def last_call(self) -> str:
        """The text of the last call, as far as it has come; empty once it has begun."""
        return ""

    def add(self, text: str) -> None:
        self._json.masked(text)
        call = self.calls[0]
        if not call.is_begun:
            text = text.lstrip()
            call.is_begun = text.startswith("{")
        if call.is_begun:
            text = self._spaces + text
            shown = text.rstrip()
            self._spaces = text[len(shown) :]
            call.arguments.append(shown)


class ObjectsText:
    """`{"name": ..., "arguments": {...}}`, one such object or a list of them.

    Reads no more of JSON than where members begin and end; whether it is JSON is found out by parsing the whole.
    """

    def __init__(self) -> None:
        self.calls: list[CallText] = []
        self._depth = 0  # of brackets, that of a list left out
        self._in_text = self._is_escaped = False
        self._key = ""  # of the member that is being read
        self._raw: list[str] = []  # of the key or the value that is being read
        self._num_shown = 0  # entries of `_raw`
        self._at_value = False
        self._last_call: list[str] = []

    @property
    def is_open(self) -> bool:
        """Whether the text has ended inside a call, if it ends here."""
        return self._depth > 0

    @property
    def last_call(self) -> str:
        """The text of the last call, as far as it has come; empty once its name and the beginning of its arguments
        are known."""
        return "".join(self._last_call)

    def add(self, text: str) -> None:
        for char in text:
            self._take(char)
            if self.calls:
                self._last_call.append(char)
                if self.calls[-1].name and self.calls[-1].is_begun:
                    self._last_call.clear()

    def _take(self, char: str) -> None:
        if self._in_text:
            self._raw.append(char)
            if self._is_escaped:
                self._is_escaped = False
            elif char == "\\":
                self._is_escaped = True
            elif char == '"':
                self._in_text = False
        elif char == '"':
            self._in_text = True
            self._raw.append(char)
        elif char in "{[":
            self._open(char)
        elif char in "}]":
            self._close(char)
        elif self._depth == 1 and char == ":" and not self._at_value:
            self._key, self._at_value = _text("".join(self._raw)), True
            self._forget()
            return
        elif self._depth == 1 and char == ",":
            self._end_member()
            return
        elif not (self._depth <= 1 and char.isspace()):
            self._raw.append(char)
        self._show()

    def _open(self, char: str) -> None:
        if self._depth == 0 and char == "[":
            return
        if self._depth == 0:
            self.calls.append(CallText())
            self._last_call.clear()
            self._forget()
        else:
            self._raw.append(char)
        self._depth += 1

    def _close(self, char: str) -> None:
        if self._depth == 0:
            return
        self._depth -= 1
        if self._depth == 0:
            self._end_member()
        else:
            self._raw.append(char)
            self._show()

    def _end_member(self) -> None:
        self._show()
        if self._at_value and self._key == NAME_KEY:
            self.calls[-1].name = _text("".join(self._raw))
        self._forget()
        self._key, self._at_value = "", False

    def _forget(self) -> None:
        self._raw.clear()
        self._num_shown = 0

    def _show(self) -> None:
        """Shows the arguments that have come. Some models write them as a text that holds JSON, which is shown when it
        is complete."""
        if self._at_value and self._key in ARGUMENT_KEYS and self._raw and self._raw[0] == "{":
            call = self.calls[-1]
            call.is_begun = True
            call.arguments += self._raw[self._num_shown :]
            self._num_shown = len(self._raw)


def _text(raw: str) -> str:
    try:
        value = json.loads(raw)
    except ValueError:
        return ""
    return value if isinstance(value, str) else ""


def calls_of(value: object) -> list[CallText] | None:
    """Whole calls from what a response template made of their text; None if that is no call."""
    items = value if isinstance(value, list) else [value]
    made = []
    for item in items:
        function = item.get("function") if isinstance(item, Mapping) else None
        if not isinstance(function, Mapping):
            return None
        name = function.get(NAME_KEY)
        given = [function[key] for key in ARGUMENT_KEYS if function.get(key) is not None]
        if not isinstance(name, str) or not name:
            return None
        made.append(CallText(name, [arguments_text(given[0] if given else {})], is_begun=True))
    return made


def arguments_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
