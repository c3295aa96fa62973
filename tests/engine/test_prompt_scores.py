"""Logprobs equal transformers', of prompts and of answers, however prompts are cut, cached, batched or preempted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from common.sampling import SamplingParams
from common.types import SampledToken
from engine import messages as m
from engine.local import scores as local_scores
from engine.sampling import prompt_scores
from tests.engine.kernels.variants import torch_best_and_slow_others
from tests.engine.test_model_engine import engine, params, prompts
from tests.engine.test_model_families import model
from tests.engine.tiny_models import VOCAB_SIZE, expected_logprobs
from tests.support.fake_device import add, assert_idle, make_core, run, tokens_of

FAMILIES = ["llama", *(pytest.param(family, marks=pytest.mark.slow) for family in ("gemma3", "mistral", "qwen3_moe"))]
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def scores_of(events: Sequence[m.Event]) -> dict[str, list[SampledToken]]:
    """By request. Fails if a token comes before the end of its prompt's scores."""
    scores: dict[str, list[SampledToken]] = {}
    answered: set[str] = set()
    for event in events:
        if isinstance(event, m.TokensGenerated):
            answered.add(event.request_id)
        elif isinstance(event, m.PromptScored):
            assert event.request_id not in answered
            assert 1 <= len(event.scores) <= prompt_scores.MAX_EVENT_TOKENS
            scores.setdefault(event.request_id, []).extend(event.scores)
    return scores


def sampled(events: Sequence[m.Event], request_id: str) -> list[SampledToken]:
    mine = (event for event in events if isinstance(event, m.TokensGenerated) and event.request_id == request_id)
    return [token for event in mine for token in event.tokens]


def assert_likely(tokens: Sequence[SampledToken], expected: torch.Tensor, num_top: int) -> None:
    """`expected` `[len(tokens), vocab_size]`: logprobs of all tokens in the place of each."""
    for token, wanted in zip(tokens, expected, strict=True):
        assert token.logprob == pytest.approx(float(wanted[token.token_id]), abs=TOLERANCE)
        assert [top.logprob for top in token.top_logprobs] == pytest.approx(
            wanted.topk(num_top).values.tolist(), abs=TOLERANCE
        )
        for top in token.top_logprobs:
            assert top.logprob == pytest.approx(float(wanted[top.token_id]), abs=TOLERANCE)
            assert top.token_id != token.token_id or top.logprob == token.logprob  # clients compare them


@pytest.mark.parametrize("kernels", torch_best_and_slow_others)
@pytest.mark.parametrize("family", FAMILIES)
def test_they_are_transformers_logprobs(
    models: Path, family: str, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside requests that want none, with all cached that may be, in slices and events that cut chunks."""
    monkeypatch.setattr(local_scores, "MAX_LOGITS", 5 * VOCAB_SIZE)
    monkeypatch.setattr("engine.forward_pass.MAX_EVENT_TOKENS", 7)
    path = model(models, family)
    core = engine(path, 64, max_model_len=128, chunk_size=24, kernels=kernels)
    for _ in range(2):
        for number, prompt in enumerate(prompts(family)):
            add(core, f"plain{number}", prompt, params=params(5))
            add(core, f"scored{number}", prompt, params=replace(params(5), prompt_logprobs=number, logprobs=2))
        events = run(core)
        assert set(scores_of(events)) == {f"scored{number}" for number in range(4)}
        for number, prompt in enumerate(prompts(family)):
            scores, answer = scores_of(events)[f"scored{number}"], sampled(events, f"scored{number}")
            token_ids = [token.token_id for token in answer]
            assert token_ids == tokens_of(events)[f"plain{number}"]
            assert [one.token_id for one in scores] == prompt[1:]
            expected = expected_logprobs(path, [*prompt, *token_ids])
            assert_likely(scores, expected[: len(prompt) - 1], number)
            assert_likely(answer, expected[len(prompt) - 1 : -1], 2)
        assert_idle(core)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_none_comes_twice_after_preemptions(models: Path, mode: str) -> None:
    path = model(models, "llama")
    core = engine(path, 9, max_model_len=128, chunk_size=8, preemption_mode=mode, swap_space_gb=0.01)
    for number, prompt in enumerate(prompts("llama")):
        add(core, str(number), prompt, params=replace(params(40), prompt_logprobs=0))
    events = run(core)
    assert max(event.num_preemptions for event in events if isinstance(event, m.TokensGenerated)) > 0
    for number, prompt in enumerate(prompts("llama")):
        scores = scores_of(events)[str(number)]
        assert [one.token_id for one in scores] == prompt[1:]
        assert_likely(scores, expected_logprobs(path, prompt)[:-1], 0)
    assert_idle(core)


def test_who_has_them_or_asks_elsewhere_gets_none(models: Path) -> None:
    """A request that goes on after its first tokens, a prefill for a decode worker, a prompt of one token."""
    core = engine(model(models, "llama"), 64, max_model_len=128)
    wanted = replace(params(4), prompt_logprobs=1)
    prompt = prompts("llama")[0]
    add(core, "whole", prompt, params=wanted)
    whole = tokens_of(run(core))["whole"]
    add(core, "resumed", prompt, params=wanted, output_token_ids=whole[:2])
    add(core, "prefill", prompt, params=wanted, mode=m.RequestMode.PREFILL)
    add(core, "short", prompt[:1], params=wanted)
    events = run(core)
    assert not scores_of(events)
    assert tokens_of(events)["resumed"] == whole[2:]
    assert tokens_of(events)["prefill"] == whole[:1]
    assert len(tokens_of(events)["short"]) == 4
    cached = {event.request_id: event.num_cached_tokens for event in events if isinstance(event, m.TokensGenerated)}
    assert cached["resumed"] > 0


def test_the_end_in_between() -> None:
    """The fake model scores nothing, but says that it did."""
    core, runner = make_core(chunk_size=4)
    asks = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=0)
    add(core, "a", [5] * 11, params=asks)
    core.step()
    assert [one.token_id for one in scores_of(core.take_events())["a"]] == [5] * 4
    core.handle(m.Release("a"))
    assert not scores_of(run(core))
    add(core, "b", [6] * 11, params=asks)
    runner.fail_next = True
    assert not scores_of(run(core))
    assert_idle(core)
