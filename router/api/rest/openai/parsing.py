"""From a REST request to what its body asks, or to the field that is wrong.

Decoding ends at the first error, and builds nothing for values that are only looked at: a body costs no more than what
it is read into.
"""

from __future__ import annotations

import json
import math
import re
from itertools import chain
from typing import TypeVar, get_args, get_type_hints

import msgspec
from fastapi import Request

from common.errors import InvalidArgumentError
from common.validation import check_request_id
from router.api.rest.http.body import read_body
from router.api.rest.openai.body_types import Body
from router.limits.admission import Admission
from router.running.request import new_request_id

MAX_SEARCHED_BYTES = 64 * 2**10  # of a body that is not valid, for the field that is to blame
MAX_KEY_CHARS = 100  # of a key in an error
MAX_ID_DIGITS = 4300  # that Python reads as an integer

BodyT = TypeVar("BodyT", bound=Body)

_NO_CHARACTER = re.compile("[\ud800-\udfff]")
_NO_NUMBER = re.compile(r"NaN|Infinity")
_INTEGER = re.compile("-?(0|[1-9][0-9]*)")
_PART = re.compile(r"\[\d+\]|[^.\[\]]+")
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`")


async def read(body_class: type[BodyT], request: Request, admission: Admission) -> BodyT:
    """Reads within the limits of `admission`, and parses. Raises what `read_body` and `parse` raise."""
    limits = admission.gate.limits
    return parse(body_class, await read_body(request, admission.max_request_bytes(), limits.receive_timeout_s))


def request_id_of(request: Request, given: str | None) -> str:
    """The request's id: the client's, `given` in the body or else in the header, or a new one. From here on each answer
    carries it, errors included."""
    name = "request_id"
    if given is None:
        name, given = "X-Request-Id", request.headers.get("x-request-id")
    if given is None:
        given = getattr(request.state, "request_id", "") or new_request_id()
    else:
        check_request_id(given, name)
    request.state.request_id = given
    return given


def parse(body_class: type[BodyT], data: bytes) -> BodyT:
    """Raises `InvalidArgumentError` with the first field that is unknown, missing or of the wrong type."""
    try:
        if not data.isascii():
            data.decode()  # values that are only looked at are not decoded below, and some are sent back as they came
        return msgspec.json.decode(data, type=body_class)
    except msgspec.ValidationError as error:
        raise _refusal(body_class, str(error), data) from error
    except UnicodeDecodeError as error:
        field = _field_of_bad_text(data)
        raise InvalidArgumentError(field, f"{'' if field else 'the body '}is not valid UTF-8") from error
    except RecursionError as error:
        raise InvalidArgumentError("", "the body is not valid JSON: it is nested too deeply") from error
    except msgspec.DecodeError as error:
        if field := _field_of_bad_text(data):
            raise InvalidArgumentError(field, "is not valid: text must be UTF-8, and numbers finite") from error
        raise InvalidArgumentError("", f"the body is not valid JSON: {error}") from error


def _refusal(body_class: type[Body], message: str, data: bytes) -> InvalidArgumentError:
    """Not made where it is raised: an error that its own traceback's frame keeps waits for the garbage collector."""
    wrong = _wrong(message, data)
    return _other_kind(body_class, wrong.field, data) or wrong


def _wrong(message: str, data: bytes) -> InvalidArgumentError:
    """Makes the error from msgspec's words, which end in the place: ... - at `$.messages[0].role`."""
    reason, _, place = message.replace(" - at `key` in `$", " of a key - at `$").partition(" - at `$")
    path = place.rstrip("`").removeprefix(".").removesuffix("[...]")
    for pattern, said in ((_UNKNOWN, "is not a known field"), (_MISSING, "is required")):
        if match := pattern.fullmatch(reason):
            return InvalidArgumentError(f"{path}.{match[1]}" if path else match[1][:100], said)
    if not path:
        return InvalidArgumentError("", "the body must be a JSON object")
    if path == "logit_bias" and (key := _bad_bias(data)) is not None:
        path += "." + (key[:MAX_KEY_CHARS] or '""')
    return InvalidArgumentError(path, f"has the wrong type: {reason}")


def _other_kind(body_class: type[Body], field: str, data: bytes) -> InvalidArgumentError | None:
    """Says that an object around `field` is of a kind that is not known here, if one is: its fields are then no more
    wrong than it is. None if none is, or if the body is too large to look for it."""
    if len(data) > MAX_SEARCHED_BYTES:
        return None
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return None
    kind: type[Body] | None = body_class
    path = ""
    for part in _PART.findall(field):
        try:
            value = value[int(part[1:-1]) if part.startswith("[") else part]
        except (LookupError, TypeError):
            return None
        path += part if part.startswith("[") else f".{part}" if path else part
        if not part.startswith("["):
            kind = None if kind is None else _body_of(kind, part)
        named = value.get("type") if isinstance(value, dict) else None
        if kind is not None and kind.kinds and isinstance(named, str) and named not in kind.kinds:
            known = " or ".join(f'"{one}"' for one in kind.kinds)
            return InvalidArgumentError(f"{path}.type", f"must be {known}, not {named[:MAX_KEY_CHARS]!r}")
    return None


def _body_of(body_class: type[Body], name: str) -> type[Body] | None:
    """The class of what a field holds, or of its entries; None if it holds values that are no bodies."""
    left: list[object] = [get_type_hints(body_class).get(name)]
    for one in left:
        if isinstance(one, type) and issubclass(one, Body):
            return one
        left += get_args(one)
    return None


def _bad_bias(data: bytes) -> str | None:
    """The first key of `logit_bias` that is no token id, or whose value is no number; None if there is none, or if the
    body is too large to look for it. A key may stand there twice."""
    if len(data) > MAX_SEARCHED_BYTES:
        return None
    try:  # numbers stay texts, of which one of many digits is read sooner
        members = json.loads(data, object_pairs_hook=tuple, parse_int=_Number, parse_float=_Number)
    except (ValueError, RecursionError):  # what comes after it is no JSON
        return None
    objects = [value for name, value in members if name == "logit_bias" and isinstance(value, tuple)]
    for key, bias in chain.from_iterable(objects):
        is_id = _INTEGER.fullmatch(key) and len(key) <= MAX_ID_DIGITS
        if not is_id or not isinstance(bias, _Number) or math.isinf(float(bias)):
            return str(key)
    return None


class _Number(str):
    """A number as it was written."""

    __slots__ = ()


def _field_of_bad_text(data: bytes) -> str:
    """The top-level field that holds NaN, infinity, or text that is no Unicode; empty if the body is no JSON object at
    all, or so large that looking for it is too much work."""
    if len(data) > MAX_SEARCHED_BYTES:
        return ""
    try:
        body = json.loads(data.decode(errors="surrogateescape"))
    except (ValueError, RecursionError):
        return ""
    for name, value in body.items() if isinstance(body, dict) else ():
        text = json.dumps(value, ensure_ascii=False)
        if _NO_CHARACTER.search(text) or _NO_NUMBER.search(text):
            return str(name)
    return ""
