"""Each field's range, and the name in the error."""

from __future__ import annotations

import math
from dataclasses import fields

import pytest

from common.errors import InvalidArgumentError, UnknownModelError
from common.types import SamplingParams
from common.validation import (
    ModelLimits,
    SamplingFields,
    chat_role,
    check_cache_salt,
    check_model,
    check_priority,
    check_prompt,
    check_request_id,
    check_text,
    validate_sampling,
)

LIMITS = ModelLimits(model="m", max_model_len=100, vocab_size=1000, max_token_bytes=8)


def validate(**given: object) -> SamplingParams:
    return validate_sampling(
        SamplingFields(**given),  # type: ignore[arg-type]
        LIMITS,
        num_prompt_tokens=10,
        draw_seed=lambda: 42,
    )


GOOD: list[tuple[str, list[object]]] = [
    ("temperature", [0, 0.5, 1.0, 5]),
    ("top_p", [1e-6, 0.5, 1]),
    ("top_k", [0, 1, 10**6]),
    ("min_p", [0, 1]),
    ("seed", [0, -(2**63), 2**63 - 1]),
    ("max_tokens", [1, 90]),
    ("min_tokens", [0, 90]),
    ("stop", [(), ("a",), ("a",) * 16]),
    ("stop_token_ids", [(), (0, 999)]),
    ("ignore_eos", [True, False]),
    ("logprobs", [0, 20]),
    ("presence_penalty", [-2, 2]),
    ("frequency_penalty", [-2, 2]),
    ("repetition_penalty", [0.01, 1, 2]),
    ("logit_bias", [{}, {0: -100.0, 999: 100.0}]),
]

BAD: list[tuple[str, list[object]]] = [
    ("temperature", [-0.1, math.nan, math.inf]),
    ("top_p", [0, -1, 1.01, math.nan]),
    ("top_k", [-2, 2**31]),
    ("min_p", [-0.1, 1.1, math.nan]),
    ("seed", [2**63, -(2**63) - 1]),
    ("max_tokens", [0, -1, 91, 2**40]),
    ("min_tokens", [-1, 91]),
    ("stop", [("",), ("a",) * 17, ("a" * 1025,)]),
    ("stop_token_ids", [(-1,), (1000,), (1,) * 1025]),
    ("logprobs", [-1, 21]),
    ("presence_penalty", [-2.1, 2.1, math.nan]),
    ("frequency_penalty", [-2.1, 2.1, math.inf]),
    ("repetition_penalty", [0, -1, math.inf]),
    ("logit_bias", [{-1: 0.0}, {1000: 0.0}, {1: math.nan}, {1: 101.0}]),
]


def test_every_field_is_covered() -> None:
    names = {field.name for field in fields(SamplingFields)}
    assert {name for name, _ in GOOD} == names
    assert {name for name, _ in BAD} == names - {"ignore_eos"}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in GOOD for value in values])
def test_good(name: str, value: object) -> None:
    result = getattr(validate(**{name: value}), name)
    assert result == (1000 if (name, value) == ("top_k", 10**6) else value)


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD for value in values])
def test_bad(name: str, value: object) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        validate(**{name: value})
    assert caught.value.field == name
    assert caught.value.message.startswith(f"{name}: ")


def test_defaults() -> None:
    params = validate()
    assert params == SamplingParams(max_tokens=90, seed=42)
    assert validate(temperature=0).seed == 0
    assert validate(top_k=-1).top_k == 0


def test_a_default_answer_length_gives_way() -> None:
    def max_tokens(num_prompt_tokens: int, min_tokens: int | None = None) -> int:
        return validate_sampling(
            SamplingFields(min_tokens=min_tokens),
            LIMITS,
            num_prompt_tokens=num_prompt_tokens,
            draw_seed=lambda: 0,
            default_max_tokens=16,
        ).max_tokens

    assert (max_tokens(10), max_tokens(95), max_tokens(10, 20)) == (16, 5, 20)


def test_too_many_tokens_names_all_three_numbers() -> None:
    with pytest.raises(InvalidArgumentError, match=r"10 prompt tokens and max_tokens 95 .* 100 tokens"):
        validate(max_tokens=95)


def test_the_clients_name_is_used() -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        validate_sampling(
            SamplingFields(top_p=2.0), LIMITS, num_prompt_tokens=1, draw_seed=lambda: 0, name=lambda n: f"params.{n}"
        )
    assert caught.value.field == "params.top_p"


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
    check_model("", LIMITS)
    check_model("m", LIMITS)
    with pytest.raises(UnknownModelError):
        check_model("M", LIMITS)
    check_cache_salt("s" * 256)
    with pytest.raises(InvalidArgumentError, match="cache_salt"):
        check_cache_salt("s" * 257)
    check_priority(0)
    with pytest.raises(InvalidArgumentError, match="priority"):
        check_priority(-1)
    assert [chat_role(role, "r") for role in ("system", "developer", "user")] == ["system", "system", "user"]
    with pytest.raises(InvalidArgumentError, match="one of"):
        chat_role("tool", "r")
