"""A real model behind the REST gateway, through the official client as its documentation shows it."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from common.config import DEFAULT_MODEL
from tests.integration.ask import Salt
from tests.integration.prompts import BY_NAME
from tests.integration.reference import Expected
from tests.integration.stack import CALL_TIMEOUT_S, Stack

pytestmark = pytest.mark.timeout(600)

Answers = dict[str, Expected]
FRANCE: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def client(two: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{two.http}/v1", api_key="none", timeout=CALL_TIMEOUT_S, max_retries=0) as client:
        yield client


def extra(answer: object) -> dict[str, object]:
    """Baton's own key of an answer."""
    baton = (getattr(answer, "model_extra", None) or {})["baton"]
    assert isinstance(baton, dict)
    return baton


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [DEFAULT_MODEL]


def test_chat(client: openai.OpenAI, salt: Salt) -> None:
    body = {"cache_salt": salt()}
    answer = client.chat.completions.create(model=DEFAULT_MODEL, messages=FRANCE, temperature=0, extra_body=body)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "The capital of France is Paris.")
    assert choice.finish_reason == "stop"
    usage = answer.usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 0
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens

    again = client.chat.completions.create(model=DEFAULT_MODEL, messages=FRANCE, temperature=0, extra_body=body)
    assert again.choices[0].message.content == choice.message.content
    assert again.usage is not None
    assert again.usage.prompt_tokens_details is not None
    assert again.usage.prompt_tokens_details.cached_tokens == (usage.prompt_tokens - 1) // 16 * 16 > 0
    assert again.id != answer.id


def test_what_baton_adds(client: openai.OpenAI, two: Stack, salt: Salt) -> None:
    a_day = {"ttft_ms": 86_400_000, "tpot_ms": 86_400_000}
    answer = client.chat.completions.create(
        model=DEFAULT_MODEL, messages=FRANCE, temperature=0, extra_body={"cache_salt": salt(), "slo": a_day}
    )
    assert answer.choices[0].message.content == "The capital of France is Paris."
    report = extra(answer)
    slo = report["slo"]
    assert isinstance(slo, dict)
    assert (slo["targets"], slo["ttft_met"], slo["tpot_met"]) == (a_day, True, True)
    assert answer.usage is not None
    by_role = {worker.role.value: worker.address for worker in two.workers()}
    assert (report["prefill_worker"], report["decode_worker"]) == (by_role["prefill"], by_role["decode"])
    num_blocks, num_bytes = report["num_blocks_moved"], report["num_bytes_moved"]
    assert isinstance(num_blocks, int)
    assert num_blocks >= answer.usage.prompt_tokens // 16
    assert num_bytes == num_blocks * 30 * 2 * 3 * 16 * 64 * 4  # layers, K and V, heads, tokens, dimensions, float32
    assert (report["fallback_reason"], report["num_migrations"], report["num_preemptions"]) == ("", 0, 0)
    timings = report["timings"]
    assert isinstance(timings, dict)
    assert 0 < timings["prefill_ms"] <= timings["ttft_ms"] < timings["total_ms"]
    assert 0 <= timings["transfer_ms"] <= timings["handoff_ms"]
    assert timings["tokens_per_second"] > 0


def test_chat_stream(client: openai.OpenAI, salt: Salt) -> None:
    stream = client.chat.completions.create(
        model=DEFAULT_MODEL,
        messages=FRANCE,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"cache_salt": salt()},
    )
    chunks = list(stream)
    texts = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]
    assert "".join(texts) == "The capital of France is Paris."
    assert len(texts) > 3  # as they come, not at the end
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["stop"]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(texts) + 1  # and the end of the sequence
    assert extra(chunks[-1])["num_blocks_moved"]


@pytest.mark.parametrize("name", ["emoji", "japanese", "russian"])
def test_whole_characters(client: openai.OpenAI, expected: Answers, salt: Salt, name: str) -> None:
    """What is streamed is what comes whole, and is the text of the tokens: no half of a character anywhere."""
    case, wanted = BY_NAME[name], expected[name]
    stream = client.completions.create(
        model=DEFAULT_MODEL,
        prompt=wanted.prompt_token_ids,
        max_tokens=case.max_tokens,
        temperature=0,
        stream=True,
        extra_body={"cache_salt": salt()},
    )
    pieces = [chunk.choices[0].text for chunk in stream]
    whole = client.completions.create(
        model=DEFAULT_MODEL, prompt=wanted.prompt_token_ids, max_tokens=case.max_tokens, temperature=0
    )
    assert "".join(pieces) == whole.choices[0].text
    assert wanted.text.startswith(whole.choices[0].text)
    assert len(wanted.text) - len(whole.choices[0].text) <= wanted.text.count("\ufffd")
    assert "\ufffd" not in whole.choices[0].text


def test_characters_that_take_several_tokens(client: openai.OpenAI, two: Stack, salt: Salt) -> None:
    """The answer is forced, token by token, to be made of characters that no single token holds."""
    text = "🥳🎶木漏れ日"
    with two.client() as baton:
        token_ids = baton.tokenize(text)
        assert len(token_ids) > len(text)
        letters = sorted(set(token_ids))
        answer = baton.generate(
            text * 3, temperature=0.0, max_tokens=40, logit_bias=dict.fromkeys(letters, 100.0), cache_salt=salt()
        )
        chunks = list(answer)
        result = answer.result()
        whole = baton.detokenize(result.token_ids)
    assert set(result.token_ids) <= set(letters)
    assert result.text == whole.rstrip("\ufffd")
    assert sum(bool(chunk.text) for chunk in chunks) < len(result.token_ids)  # some tokens had to wait for the next
    stream = client.completions.create(
        model=DEFAULT_MODEL,
        prompt=text * 3,
        max_tokens=40,
        temperature=0,
        logit_bias={str(token_id): 100 for token_id in letters},
        stream=True,
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == result.text


def test_logprobs(client: openai.OpenAI, salt: Salt) -> None:
    answer = client.chat.completions.create(
        model=DEFAULT_MODEL,
        messages=FRANCE,
        temperature=0,
        logprobs=True,
        top_logprobs=3,
        extra_body={"cache_salt": salt()},
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert answer.usage is not None
    assert len(logprobs.content) == answer.usage.completion_tokens
    for token in logprobs.content:
        assert len(token.top_logprobs) == 3
        assert (token.token, token.logprob) == (token.top_logprobs[0].token, token.top_logprobs[0].logprob)  # greedy
        assert 0 >= token.top_logprobs[0].logprob >= token.top_logprobs[1].logprob >= token.top_logprobs[2].logprob
    said = b"".join(bytes(token.bytes or []) for token in logprobs.content).decode()
    assert said.startswith("The capital of France is Paris.")


def test_completion_logprobs_are_the_same_streamed(client: openai.OpenAI) -> None:
    def ask(stream: bool) -> list[float]:
        answer = client.completions.create(
            model=DEFAULT_MODEL, prompt="One, two, three,", max_tokens=6, temperature=0, logprobs=2, stream=stream
        )
        chunks = list(answer) if isinstance(answer, openai.Stream) else [answer]
        return [
            logprob
            for chunk in chunks
            if chunk.choices and chunk.choices[0].logprobs is not None
            for logprob in chunk.choices[0].logprobs.token_logprobs or []
            if logprob is not None
        ]

    assert len(ask(False)) == 6
    assert ask(True) == pytest.approx(ask(False), abs=1e-3)


def test_stop_string_is_cut(client: openai.OpenAI, salt: Salt) -> None:
    answer = client.chat.completions.create(
        model=DEFAULT_MODEL,
        messages=FRANCE,
        temperature=0,
        stop=["ance is", "Paris"],
        extra_body={"cache_salt": salt()},
    )
    assert answer.choices[0].message.content == "The capital of Fr"
    assert answer.choices[0].finish_reason == "stop"
    assert (answer.choices[0].model_extra or {})["stop_reason"] == "ance is"


def test_seed(client: openai.OpenAI, salt: Salt) -> None:
    def ask(seed: int) -> str:
        answer = client.completions.create(
            model=DEFAULT_MODEL, prompt="My favourite", max_tokens=12, temperature=1.2, seed=seed,
            extra_body={"cache_salt": salt()},
        )  # fmt: skip
        return answer.choices[0].text

    first = ask(1)
    assert ask(1) == first
    assert ask(2) != first


def test_several_choices(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=DEFAULT_MODEL, messages=FRANCE, n=3, seed=5, temperature=1.5, max_tokens=12
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) > 1
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 36


def test_extensions(client: openai.OpenAI, expected: Answers, salt: Salt) -> None:
    def ask(**body: object) -> openai.types.Completion:
        return client.completions.create(
            model=DEFAULT_MODEL,
            prompt=expected["chat-capital"].prompt_token_ids,
            max_tokens=24,
            extra_body={"cache_salt": salt(), **body},
        )

    greedy = ask(temperature=0)
    assert greedy.choices[0].finish_reason == "stop"
    assert ask(temperature=2, top_k=1).choices[0].text == greedy.choices[0].text
    assert ask(temperature=2, min_p=1).choices[0].text == greedy.choices[0].text
    for body in ({"ignore_eos": True}, {"min_tokens": 24}):
        answer = ask(temperature=0, **body)
        assert answer.usage is not None
        assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (24, "length")
    third = expected["chat-capital"].output_token_ids[2]
    answer = ask(temperature=0, stop_token_ids=[third])
    assert answer.usage is not None
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (3, "stop")
    assert (answer.choices[0].model_extra or {})["stop_reason"] == third


def test_salts_share_nothing(client: openai.OpenAI, expected: Answers, salt: Salt) -> None:
    def num_cached(cache_salt: str) -> int:
        answer = client.completions.create(
            model=DEFAULT_MODEL,
            prompt=expected["random-160"].prompt_token_ids,
            max_tokens=2,
            extra_body={"cache_salt": cache_salt},
        )
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        return answer.usage.prompt_tokens_details.cached_tokens or 0

    mine, theirs = salt(), salt()
    assert [num_cached(one) for one in (mine, theirs, mine, theirs)] == [0, 0, 144, 144]
