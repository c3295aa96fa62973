"""Everything that can be wrong with a request but its sampling parameters (`common.sampling`), checked in one place for
gRPC and REST alike.

Each function raises `InvalidArgumentError` with the field as the client wrote it. Numbers are checked as they come off
the wire, which has checked their types. Nothing here tokenizes: a text that can be refused by its length alone is
refused before any work is done on it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from common.errors import InvalidArgumentError

MAX_MESSAGES = 4096
MAX_SALT_CHARS = 256
MAX_PRIORITY = 100
MAX_REQUEST_ID_CHARS = 128
CHAT_ROLES = ("system", "developer", "user", "assistant", "tool")

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]+", re.ASCII)


@dataclass(slots=True, frozen=True, kw_only=True)
class ModelLimits:
    """What the served model can take."""

    model: str  # name that clients use
    max_model_len: int  # tokens, prompt and answer together
    vocab_size: int
    max_token_bytes: int  # UTF-8 length of the longest vocabulary entry
    # False for an id with which the model pads its vocabulary. Such ids are never drawn.
    is_token: Callable[[int], bool] = field(default=lambda _: True, compare=False)

    @property
    def max_prompt_bytes(self) -> int:
        """A text longer than this has more than `max_model_len` tokens, however it is split."""
        return self.max_model_len * self.max_token_bytes


def check_request_id(request_id: str, name: str = "request_id") -> None:
    if not request_id:
        raise InvalidArgumentError(name, "must not be empty")
    if len(request_id) > MAX_REQUEST_ID_CHARS:
        raise InvalidArgumentError(name, f"must have at most {MAX_REQUEST_ID_CHARS} characters, not {len(request_id)}")
    if not _REQUEST_ID.fullmatch(request_id):
        raise InvalidArgumentError(name, "may only contain ASCII letters, digits and . _ : / + = @ -")


def check_cache_salt(cache_salt: str, name: str = "cache_salt") -> None:
    if len(cache_salt) > MAX_SALT_CHARS:
        raise InvalidArgumentError(name, f"must have at most {MAX_SALT_CHARS} characters, not {len(cache_salt)}")


def chat_role(role: str, name: str) -> str:
    """The role as chat templates know it: newer clients say `developer` for what models call `system`."""
    if role == "developer":
        return "system"
    if role not in CHAT_ROLES:
        raise InvalidArgumentError(name, f"must be one of {', '.join(CHAT_ROLES)}, not {role!r}")
    return role


def check_priority(priority: int, name: str = "priority") -> None:
    if abs(priority) > MAX_PRIORITY:
        raise InvalidArgumentError(name, f"must be in [-{MAX_PRIORITY}, {MAX_PRIORITY}], not {priority}")


def check_text(text: str, limits: ModelLimits, name: str) -> None:
    """Refuses a text that is empty, not encodable, or certainly too long, before it is tokenized."""
    if not text:
        raise InvalidArgumentError(name, "must not be empty")
    # Characters are at most four bytes each, so most texts need no second look.
    if len(text) * 4 <= limits.max_prompt_bytes and text.isascii():
        return
    if len(text) > limits.max_prompt_bytes or len(encoded(text, name)) > limits.max_prompt_bytes:
        raise InvalidArgumentError(
            name,
            f"is too long: {len(text)} characters cannot fit into {limits.max_model_len} tokens, the model's context",
        )


def encoded(text: str, name: str) -> bytes:
    """UTF-8 bytes of `text`. JSON can carry lone surrogates, which no tokenizer takes."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgumentError(name, f"is not valid Unicode: {error.reason} at character {error.start}") from error


def check_prompt(prompt_token_ids: Sequence[int], limits: ModelLimits, name: str, *, has_answer: bool = True) -> None:
    """The prompt must be there, lie inside the vocabulary, and leave room for one token if it has an answer."""
    if not prompt_token_ids:
        raise InvalidArgumentError(name, "must not be empty")
    if not has_answer:
        check_token_count(len(prompt_token_ids), limits, name)
    elif len(prompt_token_ids) >= limits.max_model_len:
        raise InvalidArgumentError(
            name,
            f"is too long: {len(prompt_token_ids)} tokens leave no room for an answer in the model's context of "
            f"{limits.max_model_len} tokens",
        )
    check_token_ids(prompt_token_ids, limits, name)


def check_messages(num_messages: int, limits: ModelLimits, name: str) -> None:
    """Refuses a conversation that is empty or has more messages than the context has tokens, before it is rendered."""
    if not num_messages:
        raise InvalidArgumentError(name, "must not be empty")
    most = min(MAX_MESSAGES, limits.max_model_len)
    if num_messages > most:
        raise InvalidArgumentError(name, f"must have at most {most} messages, not {num_messages}")


def check_token_count(num_tokens: int, limits: ModelLimits, name: str) -> None:
    if num_tokens > limits.max_model_len:
        raise InvalidArgumentError(
            name, f"must have at most {limits.max_model_len} tokens, the model's context, not {num_tokens}"
        )


def check_token_ids(token_ids: Sequence[int], limits: ModelLimits, name: str) -> None:
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < limits.vocab_size):
        return
    index, token_id = next((i, t) for i, t in enumerate(token_ids) if not 0 <= t < limits.vocab_size)
    raise InvalidArgumentError(
        name, f"token id {token_id} (at index {index}) is outside the vocabulary of {limits.vocab_size} tokens"
    )
