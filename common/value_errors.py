"""What pydantic finds wrong with a request's value, in Baton's words: the field, what it must be, and what it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from common.errors import InvalidArgumentError

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

_MUST = {
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be at most {le}",
    "finite_number": "must be a finite number",
    "float_type": "must be a number",
    "int_type": "must be an integer",
    "bool_type": "must be true or false",
    "string_type": "must be a string",
    "tuple_type": "must be a list",
    "dict_type": "must be a mapping",
    "string_too_long": "must have at most {max_length} characters",
    "string_too_short": "must have at least {min_length} characters",
    "too_long": "must have at most {max_length} entries",
    "too_short": "must have at least {min_length} entries",
}
MAX_SHOWN_CHARS = 40


def refusal(error: ErrorDetails, name: Callable[[str], str]) -> InvalidArgumentError:
    """`name` gives the client's name for a field. Entries of a list or mapping are named in the reason."""
    field, entry = _place(error["loc"], name)
    kind, context = error["type"], error.get("ctx", {})
    if kind == "value_error":
        reason = str(context["error"])
    elif kind == "unexpected_keyword_argument":
        reason = "is not a known field"
    elif kind == "string_too_short" and context["min_length"] == 1:
        reason = "must not be empty"
    else:
        shown = {name: _number(one) for name, one in context.items()}
        reason = _MUST[kind].format(**shown) if kind in _MUST else error["msg"]
        reason += _shown(error["input"])
    return InvalidArgumentError(field, f"entry {entry}: {reason}" if entry else reason)


def _place(loc: Sequence[int | str], name: Callable[[str], str]) -> tuple[str, str]:
    """(field, entry) from pydantic's path: `logit_bias` and `5` for ("logit_bias", 5)."""
    path = [part for part in loc[1:] if part != "[key]"]
    entry = str(path.pop()) if path and isinstance(path[-1], int) else ""
    own = str(loc[0]) if loc else ""
    given = name(own) if loc else ""
    if given != own:  # the client wrote it in another shape (`guided_choice`), which has no such members
        path = [part for part in path if isinstance(part, int)]
    inner = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return given + inner, entry


def _number(bound: object) -> object:
    """A bound as it was declared: every digit of an integer counts."""
    return f"{bound:g}" if isinstance(bound, float) and not bound.is_integer() else _whole(bound)


def _whole(bound: object) -> object:
    return int(bound) if isinstance(bound, float) else bound


def _shown(value: object) -> str:
    """What was given, if it is short."""
    if not isinstance(value, int | float | str):
        return f", and has {len(value)}" if isinstance(value, Sequence | dict) else ""
    text = repr(value)
    return f", not {text}" if len(text) <= MAX_SHOWN_CHARS else ""
