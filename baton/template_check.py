"""Looks at a model's chat template before any process starts: one that does not compile is said at once, with its file.
Such a model still continues texts; only chats are refused."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from common.errors import BatonError
from text.chat_template import ChatTemplate

log = logging.getLogger(__name__)


def warn_of_template(model: Path) -> None:
    """`model` is a folder on disk; of anything else nothing is said."""
    for name, source in _templates(model):
        try:
            ChatTemplate(source, {})
        except BatonError as error:
            what = {"file": str(model / name), "reason": error.message}
            log.warning("chats will be refused, completions will not: the chat template is wrong", extra=what)


def _templates(model: Path) -> list[tuple[str, str]]:
    """(file, source) of the template that is used: the first place that has one, newest convention first."""
    try:
        if (model / "chat_template.jinja").is_file():
            return [("chat_template.jinja", (model / "chat_template.jinja").read_text(encoding="utf-8"))]
        for name in ("tokenizer_config.json", "chat_template.json"):
            given = json.loads((model / name).read_bytes()).get("chat_template") if (model / name).is_file() else None
            if isinstance(given, list):  # several, by name
                return [(name, str(one["template"])) for one in given if one.get("name") in ("default", "tool_use")]
            if isinstance(given, str):
                return [(name, given)]
    except (OSError, ValueError, AttributeError, KeyError, TypeError):
        pass  # whoever loads the tokenizer says what is wrong with these files
    return []
