"""What requests may hold beside sampling parameters, and the name in the error."""

from __future__ import annotations

import pytest

from common.errors import InvalidArgumentError
from common.validation import (
    ModelLimits,
    chat_role,
    check_cache_salt,
    check_priority,
    check_prompt,
    check_request_id,
    check_text,
)

LIMITS = ModelLimits(model="m", max_model_len=100, vocab_size=1000, max_token_bytes=8)


@pytest.mark.parametrize("prompt", [[], [1] * 100, [0, 1000], [-1]])
def test_bad_prompts(prompt: list[int]) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        check_prompt(prompt, LIMITS, "prompt")
    assert caught.value.field == "prompt"
    check_prompt([0, 999] * 49, LIMITS, "prompt")


@pytest.mark.parametrize("text", ["", "a" * 801, "é" * 401, "\ud800"])
def test_bad_texts(text: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        check_text(text, LIMITS, "prompt")
    assert caught.value.field == "prompt"
    check_text("a" * 800, LIMITS, "prompt")
    check_text("é" * 400, LIMITS, "prompt")


@pytest.mark.parametrize("request_id", ["", "a b", "ü", "a" * 129, "a\n", "\x00"])
def test_bad_request_ids(request_id: str) -> None:
    with pytest.raises(InvalidArgumentError, match="request_id"):
        check_request_id(request_id)
    check_request_id("a-Z_0.9:x" * 14)


def test_the_rest() -> None:
    check_cache_salt("s" * 256)
    with pytest.raises(InvalidArgumentError, match="cache_salt"):
        check_cache_salt("s" * 257)
    check_priority(-100)
    with pytest.raises(InvalidArgumentError, match="priority"):
        check_priority(101)
    assert [chat_role(role, "r") for role in ("system", "developer", "user", "tool")] == [
        "system",
        "system",
        "user",
        "tool",
    ]
    with pytest.raises(InvalidArgumentError, match="one of"):
        chat_role("function", "r")
