"""Reasoning that a client of `/v1/responses` keeps for the next turn as text that it need not understand
(`encrypted_content`). Nothing is stored here, so it has to hold the reasoning itself.

It is not secret: the same answer has the reasoning in plain text, and a client may send reasoning of its own.
"""

from __future__ import annotations

import base64
import binascii

from common.errors import InvalidArgumentError

_KIND = "baton1."


def kept(reasoning: str) -> str:
    return _KIND + base64.urlsafe_b64encode(reasoning.encode()).decode()


def given_back(text: str, where: str) -> str:
    """The reasoning. Raises `InvalidArgumentError` for `where` if `text` is not from `kept`."""
    kind, data = text[: len(_KIND)], text[len(_KIND) :]
    try:
        if kind == _KIND:
            return base64.b64decode(data, altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError):  # no base64, or no UTF-8 in it
        pass
    raise InvalidArgumentError(where, "is not from an answer of this service")
