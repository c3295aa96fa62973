"""`python -m text.template_child LIMITS`: the child of `text.template_process`, which says what it is for."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from functools import lru_cache

import jinja2
import jinja2.constants  # which would be read when a template asks for it
import jinja2.debug

from common.bounded_child import Job, prepare, serve
from common.bounded_process import Limits
from common.errors import InvalidArgumentError, UnavailableError
from text.chat_template import ChatTemplate
from text.conversation import Conversation, Tool, Tools
from text.template_process import FIELD

MAX_COMPILED = 16
MAX_REASON_CHARS = 1000

_NAME = "the request's chat template"


def main(arguments: Sequence[str]) -> int:
    prepare()
    (limits,) = arguments
    for name in os.environ.keys() - {"TZ"}:
        del os.environ[name]
    _warm_up()
    return serve(do, Limits(**json.loads(limits)), opens_files=False)


def _warm_up() -> None:
    """What is read or imported at its first use is so now: by templates that work, fail and are wrong."""
    rest = {"special_tokens": {}, "max_chars": 1000, "tools": {}, "conversation": {"messages": [{"role": "user"}]}}
    for template in ("{{ strftime_now('%c') }}{{ messages | tojson(indent=1) }}", "{{ raise_exception('x') }}", "{{"):
        do({"template": template, **rest})


def do(job: Job) -> dict[str, object]:
    """The variables of a template, or with a conversation the prompt that it writes."""
    try:
        if "conversation" not in job:
            return {"variables": sorted(_compiled(job["template"], ()).variables)}
        template = _compiled(job["template"], tuple(sorted(job["special_tokens"].items())))
        return _within(template.render(_conversation(job)), job["max_chars"])
    except InvalidArgumentError as error:
        return _wrong(error.reason, FIELD if error.field == "messages" else error.field)
    except MemoryError:
        raise
    except Exception as error:  # whatever it is, the template did it
        return _wrong(f"cannot be rendered: {type(error).__name__}: {error}")


@lru_cache(MAX_COMPILED)
def _compiled(source: str, special_tokens: tuple[tuple[str, str], ...]) -> ChatTemplate:
    try:
        return ChatTemplate(source, dict(special_tokens), name=_NAME)
    except UnavailableError as error:
        raise InvalidArgumentError(FIELD, f"cannot be compiled: {_reason(error.__cause__ or error)}") from error
    except MemoryError:
        raise
    except Exception as error:  # of Python's own compiler
        raise InvalidArgumentError(FIELD, f"cannot be compiled: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    if isinstance(error, jinja2.TemplateSyntaxError):
        return f"{error.message} at line {error.lineno}"
    return str(error) or type(error).__name__


def _conversation(job: Job) -> Conversation:
    told = {**job["tools"], "tools": tuple(Tool(**tool) for tool in job["tools"].get("tools", ()))}
    return Conversation(tools=Tools(**told), **job["conversation"])


def _within(text: str, max_chars: int) -> dict[str, object]:
    if len(text) > max_chars:
        return _wrong(f"writes a prompt of {len(text)} characters, more than {max_chars}")
    return {"text": text}


def _wrong(reason: str, field: str = FIELD) -> dict[str, object]:
    shown = reason if len(reason) <= MAX_REASON_CHARS else f"{reason[:MAX_REASON_CHARS]}..."
    return {"field": field, "wrong": shown}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
