"""Chat templates that come with requests, compiled and rendered in a child process.

A template is a program. The sandbox in which it runs lets it change and reach nothing, but not end: it can loop for
ever, or write a text as large as the memory. So what a client sent is run within limits (`common.bounded_process`), by
the same code that renders a model's own template. The child can open no file and no socket.
"""

from __future__ import annotations

import atexit
import json
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache

from common.bounded_process import MAX_ANSWER_S, BoundedProcess, ChildWords, JobDiedError, Limits
from common.errors import InternalError, InvalidArgumentError
from text.chat_template import BaseTemplate
from text.conversation import Conversation

FIELD = "chat_template"
MAX_CHARS = 65_536  # of a template; published ones have up to 30,000
MAX_KNOWN = 64
LIMITS = Limits(
    cpu_s=1.0,  # a usual template takes a millisecond
    num_bytes=128 * 2**20,
    stack_bytes=2 * 2**20,
)

_CHILD = "text.template_child"
_WORDS = ChildWords(
    subjects="chat templates",
    work="render",
    waiting="chat templates of others are being rendered",
    broken="it is nested too deeply",
)


class TemplateProcess(BoundedProcess):
    """Compiles and renders templates in a child."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        super().__init__(_CHILD, [json.dumps(asdict(limits))], limits, _WORDS)
        self._known: dict[str, frozenset[str] | str] = {}  # the last ones: their variables, or what is wrong

    def template(self, source: str, special_tokens: Mapping[str, str], max_chars: int) -> RequestTemplate:
        """`max_chars`: of the prompts that it writes. Raises `InvalidArgumentError` if it cannot be compiled, and
        `UnavailableError` as `ask` does."""
        if (known := self._known.get(source)) is None:
            known = self._known[source] = self._variables(source)
            while len(self._known) > MAX_KNOWN:
                self._known.pop(next(iter(self._known)), None)
        if isinstance(known, str):
            raise InvalidArgumentError(FIELD, known)
        return RequestTemplate(self, source, known, special_tokens, max_chars)

    def _variables(self, source: str) -> frozenset[str] | str:
        try:
            answer = self._answer_to({"template": source})
        except InvalidArgumentError as error:
            return error.reason
        match answer:
            case {"variables": list(names)}:
                return frozenset(map(str, names))
        raise InternalError("the answer about a chat template is not understood")

    def render(self, source: str, special_tokens: Mapping[str, str], conversation: Conversation, max_chars: int) -> str:
        """Raises `InvalidArgumentError`."""
        tools = conversation.tools
        answer = self._answer_to(
            {
                "template": source,
                "special_tokens": dict(special_tokens),
                "max_chars": max_chars,
                "tools": {"tools": [asdict(tool) for tool in tools.shown], "parallel": tools.parallel},
                "conversation": {
                    "messages": [dict(message) for message in conversation.messages],
                    "template_options": dict(conversation.template_options),
                    "effort": conversation.effort,
                    "effort_field": conversation.effort_field,
                    "has_generic_tools": conversation.has_generic_tools,
                    "asks_answer": conversation.asks_answer,
                    "continues_last": conversation.continues_last,
                },
            }
        )
        match answer:
            case {"text": str(text)}:
                return text
        raise InternalError("the answer about a chat template is not understood")

    def _answer_to(self, job: dict[str, object]) -> dict[str, object]:
        try:
            answer = self.ask(job, MAX_ANSWER_S)
        except JobDiedError as error:
            raise InvalidArgumentError(FIELD, f"cannot be used: {error}") from None
        match answer:
            case {"field": str(field), "wrong": str(reason)}:
                raise InvalidArgumentError(field, reason)
        return answer


class RequestTemplate(BaseTemplate):
    """One that a client sent."""

    def __init__(
        self,
        process: TemplateProcess,
        source: str,
        variables: frozenset[str],
        special_tokens: Mapping[str, str],
        max_chars: int,
    ) -> None:
        super().__init__(source, variables)
        self._process, self._special_tokens, self._max_chars = process, special_tokens, max_chars

    def render(self, conversation: Conversation) -> str:
        """Blocking."""
        return self._process.render(self.source, self._special_tokens, conversation, self._max_chars)


@cache
def shared_process() -> TemplateProcess:
    """The one of this process."""
    process = TemplateProcess()
    atexit.register(process.close)
    return process
