"""Renders chat templates, as the transformers library does, without importing it.

A template is a program that came with a model: it runs in a sandbox in which it can change nothing but its own
variables. What it sees and which extras it may use (`tojson`, `raise_exception`, `strftime_now`, `generation` blocks,
loop controls) are the conventions that model publishers write their templates for.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from datetime import datetime
from functools import cached_property

import jinja2
import jinja2.meta

from common import chat_templates
from common.errors import InvalidArgumentError, UnavailableError
from text.conversation import DEFAULT_EFFORT, Conversation, with_objects
from text.generic_tools import in_words

EFFORT_VARIABLE = "reasoning_effort"
SWITCHES = ("enable_thinking", "thinking")  # variables that turn reasoning on and off: Qwen3's, DeepSeek's
_REASONS = re.compile("think|reason", re.IGNORECASE)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes HTML, which no model was trained on
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _now(time_format: str) -> str:
    return datetime.now().strftime(time_format)


class BaseTemplate(ABC):
    """What is known of a template without rendering it. `variables`: names that it reads and does not set."""

    def __init__(self, source: str, variables: frozenset[str]) -> None:
        self.source = source
        self.variables = variables

    @abstractmethod
    def render(self, conversation: Conversation) -> str:
        """The prompt that asks for the assistant's next message, or without `asks_answer` the messages alone.

        Raises `InvalidArgumentError` if the template refuses the conversation, and for what it does not know of.
        """

    @property
    def knows_tools(self) -> bool:
        return "tools" in self.variables

    @property
    def knows_calls(self) -> bool:
        """Whether it writes earlier calls of tools."""
        return self.knows_tools or "tool_calls" in self.source


class ChatTemplate(BaseTemplate):
    """A compiled one."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], *, name: str = "the model's chat template"
    ) -> None:
        """`special_tokens` are variables: `bos_token`, `eos_token` and the like. `name`: what errors call it. Raises
        `UnavailableError` if it cannot be compiled."""
        environment = chat_templates.environment()
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _now
        self._special_tokens, self._name = dict(special_tokens), name
        try:
            self._template = environment.from_string(source)
            self._template.globals = {**self._template.globals}  # a chain of dictionaries is slow to read through
            variables = frozenset(jinja2.meta.find_undeclared_variables(environment.parse(source)))
        except (jinja2.TemplateError, RecursionError) as error:
            raise UnavailableError(f"{name} cannot be compiled: {error}") from error
        super().__init__(source, variables)

    def render(self, conversation: Conversation) -> str:
        tools = () if conversation.has_generic_tools else conversation.tools.shown
        if tools and not self.knows_tools:
            raise InvalidArgumentError("tools", f"{self._name} knows no tools")
        for name in conversation.template_options:
            if name not in self.variables or name in self._special_tokens:
                raise InvalidArgumentError(f"chat_template_kwargs.{name}", f"is no variable of {self._name}")
        effort = self._effort(conversation)
        if conversation.has_generic_tools:
            messages = in_words(conversation, takes_system=self._takes_system)
        else:
            messages = [dict(message) for message in conversation.messages]
        variables: dict[str, object] = {
            "tools": [tool.as_json() for tool in tools] or None,
            "documents": None,
            "add_generation_prompt": conversation.asks_answer and not conversation.continues_last,
            **self._special_tokens,
            **conversation.template_options,
            **effort,
        }
        try:
            try:
                return self._template.render(messages=messages, **variables)
            except (jinja2.TemplateError, TypeError, LookupError):
                if (others := with_objects(messages)) is None:
                    raise
                return self._template.render(messages=others, **variables)
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise InvalidArgumentError("messages", f"{self._name} refuses the messages: {error}") from error

    @cached_property
    def _takes_system(self) -> bool:
        """Whether it writes the text of a system message: some templates refuse it, some leave it out."""
        mark = "the-system-text"
        try:
            text: str = self._template.render(
                messages=[{"role": "system", "content": mark}, {"role": "user", "content": "x"}],
                add_generation_prompt=True,
                **self._special_tokens,
            )
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError):
            return False
        return mark in text

    def _effort(self, conversation: Conversation) -> dict[str, object]:
        """The variables that tell the template how much to reason: one with OpenAI's name, and a switch. Without any of
        them the default effort is what the model does anyway, and so is none at all if it never reasons."""
        effort, field = conversation.effort, conversation.effort_field
        if not effort:
            return {}
        variables: dict[str, object] = {name: effort != "none" for name in SWITCHES if name in self.variables}
        if EFFORT_VARIABLE in self.variables:
            variables[EFFORT_VARIABLE] = effort
        is_kept = effort == DEFAULT_EFFORT or (effort == "none" and not _REASONS.search(self.source))
        if not variables and not is_kept:
            raise InvalidArgumentError(field, f"{effort!r} is not supported: {self._name} cannot say it")
        for name, value in variables.items():
            if conversation.template_options.get(name, value) != value:
                raise InvalidArgumentError(f"chat_template_kwargs.{name}", f"contradicts {field}, {effort!r}")
        return variables
