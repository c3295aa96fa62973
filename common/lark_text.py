"""Text of Lark grammars and regular expressions, before llguidance reads it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

_TOKEN = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|#[^\n]*|/(?:\\.|[^/\\])+/|%json\b\s*')
_CLASSES = {"d": "[0-9]", "D": "[^0-9]", "w": "[a-zA-Z0-9_]", "W": "[^a-zA-Z0-9_]"}


def kept_text(lark: str, kept_schema: Callable[[object], dict[str, Any]], options: dict[str, Any]) -> str:
    """`lark` with each `%json` schema as `kept_schema` has it, and classes of ASCII in its regular expressions. A
    schema's own `x-guidance` adds to `options`."""
    pieces, end = [], 0
    while found := _TOKEN.search(lark, end):
        token = found[0]
        is_regex = token.startswith("/") and not token.startswith("//")
        pieces += [lark[end : found.start()], ascii_classes(token) if is_regex else token]
        end = found.end()
        if not token.startswith("%json"):
            continue
        try:
            schema, after = json.JSONDecoder().raw_decode(lark, end)
        except ValueError:  # llguidance says what is wrong
            continue
        given = schema.pop("x-guidance", {}) if isinstance(schema, dict) else {}
        if isinstance(given, dict):
            given = options | given
        pieces.append(json.dumps(kept_schema(schema) | {"x-guidance": given}))
        end = after
    return "".join([*pieces, lark[end:]])


def ascii_classes(regex: str) -> str:
    """`regex` with the digits and word characters of ASCII for `\\d` and `\\w`, as JSON schema's `pattern` has them."""
    return re.sub(r"\\(.)", lambda found: _CLASSES.get(found[1], found[0]), regex, flags=re.DOTALL)
