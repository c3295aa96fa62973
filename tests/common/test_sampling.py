"""Each sampling parameter's range, and the name and words of the error."""

from __future__ import annotations

import math

import pytest

from common.errors import InvalidArgumentError
from common.guided import Guided
from common.sampling import MAX_TOKEN_IDS, SamplingOptions, SamplingParams, TokenSequence, parameters, resolve
from common.validation import ModelLimits

LIMITS = ModelLimits(model="m", max_model_len=100, vocab_size=1000, max_token_bytes=8)


def validate(**given: object) -> SamplingParams:
    return resolve(given, LIMITS, num_prompt_tokens=10, draw_seed=lambda: 42)


GOOD: list[tuple[str, list[object]]] = [
    ("temperature", [0, 0.5, 1.0, 5]),
    ("top_p", [1e-6, 0.5, 1]),
    ("top_k", [0, 1, 10**6]),
    ("min_p", [0, 1]),
    ("seed", [0, -(2**63), 2**63 - 1]),
    ("max_tokens", [1, 90]),
    ("min_tokens", [0, 90]),
    ("stop", [(), ("a",), ("a",) * 16]),
    ("include_stop_str_in_output", [True, False]),
    ("stop_token_ids", [(), (0, 999)]),
    ("ignore_eos", [True, False]),
    ("logprobs", [0, 20]),
    ("prompt_logprobs", [0, 20]),
    ("truncate_prompt_tokens", [-1, 1, 2**31 - 1]),
    ("presence_penalty", [-2, 2]),
    ("frequency_penalty", [-2, 2]),
    ("repetition_penalty", [0.01, 1, 2]),
    ("logit_bias", [{}, {0: -100.0, 999: 100.0}]),
    ("allowed_token_ids", [(), (0, 999)]),
    ("bad_words", [(), ("a",), ("a",) * 256]),
    ("bad_words_ids", [(), (TokenSequence(token_ids=(0, 999)),)]),
    ("speculate", [True, False]),
    ("guided", [None, Guided(regex="a+"), Guided(choice=("a", "b")), Guided(json_object=True)]),
]

BAD: list[tuple[str, list[object]]] = [
    ("temperature", [-0.1, math.nan, math.inf]),
    ("top_p", [-1, 1.01, math.nan]),
    ("top_k", [-2, 2**31]),
    ("min_p", [-0.1, 1.1, math.nan]),
    ("seed", [2**63, -(2**63) - 1]),
    ("max_tokens", [0, -1, 91, 2**40]),
    ("min_tokens", [-1, 91]),
    ("stop", [("",), ("a",) * 17, ("a" * 1025,)]),
    ("stop_token_ids", [(-1,), (1000,), (1,) * 1025]),
    ("logprobs", [-1, 21]),
    ("prompt_logprobs", [-1, 21]),
    ("truncate_prompt_tokens", [-2, 0, 2**31, 1.0]),
    ("presence_penalty", [-2.1, 2.1, math.nan]),
    ("frequency_penalty", [-2.1, 2.1, math.inf]),
    ("repetition_penalty", [0, -1, math.inf]),
    ("logit_bias", [{-1: 0.0}, {1000: 0.0}, {1: math.nan}, {1: 101.0}]),
    ("allowed_token_ids", [(-1,), (1000,), (1,) * 1025]),
    ("bad_words", [("",), ("a",) * 257, ("a" * 1025,)]),
    ("guided", [{}, {"regex": "a", "json_object": True}, {"choice": []}, {"choice": ["x" * 40000] * 2}]),
]


def test_every_field_is_covered() -> None:
    names = set(parameters())
    assert {name for name, _ in GOOD} == names
    assert {name for name, _ in BAD} == names - {
        "ignore_eos",
        "include_stop_str_in_output",
        "bad_words_ids",
        "speculate",
    }


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


@pytest.mark.parametrize(
    ("value", "field"),
    [
        ([{"token_ids": [1]}, {"token_ids": [1000]}], "bad_words_ids[1].token_ids"),
        ([{"token_ids": []}], "bad_words_ids[0].token_ids"),
        ([TokenSequence(token_ids=(2**40,))], "bad_words_ids[0].token_ids"),  # checked before, without a vocabulary
        ([{"token_ids": [1], "ids": [1]}], "bad_words_ids[0].ids"),
    ],
)
def test_a_bad_sequence_is_named(value: object, field: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        validate(bad_words_ids=value)
    assert caught.value.field == field


def test_defaults() -> None:
    params = validate()
    assert params == SamplingParams(max_tokens=90, seed=42)
    assert validate(temperature=0).seed == 0
    assert validate(top_k=-1).top_k == 0


def test_no_probability_at_all_is_greedy() -> None:
    assert validate(top_p=0, temperature=1.5) == validate(temperature=0)


def test_a_default_answer_length_gives_way() -> None:
    def max_tokens(num_prompt_tokens: int, **given: object) -> int:
        return resolve(
            given, LIMITS, num_prompt_tokens=num_prompt_tokens, draw_seed=lambda: 0, default_max_tokens=16
        ).max_tokens

    assert (max_tokens(10), max_tokens(95), max_tokens(10, min_tokens=20)) == (16, 5, 20)


def test_too_many_tokens_names_all_three_numbers() -> None:
    with pytest.raises(InvalidArgumentError, match=r"10 prompt tokens and max_tokens 95 .* 100 tokens"):
        validate(max_tokens=95)


def test_the_clients_name_is_used() -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        resolve({"top_p": 2.0}, LIMITS, num_prompt_tokens=1, draw_seed=lambda: 0, name=lambda n: f"params.{n}")
    assert caught.value.field == "params.top_p"


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("temperature", -0.5, "must be at least 0, not -0.5"),
        ("temperature", "1", "must be a number, not '1'"),
        ("temperature", True, "must be a number, not True"),
        ("top_p", 1.5, "must be at most 1, not 1.5"),
        ("repetition_penalty", 0, "must be above 0, not 0"),
        ("seed", -(2**63) - 1, "must be at least -9223372036854775808, not -9223372036854775809"),
        ("seed", 2**63, "must be at most 9223372036854775807, not 9223372036854775808"),
        ("min_tokens", 2**31, "must be at most 2147483647, not 2147483648"),
        ("top_k", 1.0, "must be an integer, not 1.0"),
        ("ignore_eos", 1, "must be true or false, not 1"),
        ("stop", ("a", ""), "entry 1: must not be empty"),
        ("stop", ("a",) * 17, "must have at most 16 entries, not 17"),
        ("stop_token_ids", (1, 1000), "token id 1000 (at index 1) is outside the vocabulary of 1000 tokens"),
        ("stop_token_ids", 5, "must be a list, not 5"),
        ("logit_bias", {5: 101}, "entry 5: must be at most 100, not 101"),
        ("unheard_of", 1, "is not a known field"),
    ],
)
def test_the_reason_says_what_is_wanted(name: str, value: object, reason: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        validate(**{name: value})
    assert (caught.value.field, caught.value.reason) == (name, reason)


def test_entries_are_counted_before_they_are_read() -> None:
    """Each that is wrong would make an error of its own."""
    for name, value in (("logit_bias", dict.fromkeys(range(-(10**6), 0), 0.0)), ("stop", [""] * 10**6)):
        with pytest.raises(InvalidArgumentError, match="must have at most"):
            validate(**{name: value})
    assert len(validate(logit_bias=dict.fromkeys(range(1000), 0.5)).logit_bias) == 1000 < MAX_TOKEN_IDS


def test_options_are_the_parameters() -> None:
    assert SamplingOptions.__annotations__.keys() == parameters().keys()
    assert all(parameter.help for parameter in parameters().values())
