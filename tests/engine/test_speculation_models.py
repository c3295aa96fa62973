"""Greedy answers with speculation are transformers', on real models in float32, and drawn ones those without it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from common.sampling import SamplingParams
from engine import messages as m
from tests.engine.fakes import add, assert_idle, run, tokens_of
from tests.engine.test_model_engine import KERNELS, engine
from tests.engine.test_model_families import greedy_of_transformers, model
from tests.engine.tiny_models import FAMILIES, VOCAB_SIZE

QUICK = ("llama", "mistral", "gemma2")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def prompts() -> list[list[int]]:
    """Texts that repeat themselves, so that drafts come true now and then."""
    rng = random.Random(3)
    phrase = [rng.randrange(3, VOCAB_SIZE) for _ in range(7)]
    return [phrase * 5, [*phrase * 2, 5, *phrase[:4]], [rng.randrange(3, VOCAB_SIZE) for _ in range(30)] * 2]


def num_drafted(events: list[m.Event]) -> int:
    return sum(e.num_drafted_tokens for e in events if isinstance(e, m.TokensGenerated) and e.finish_reason)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(
    "family", [one if one in QUICK else pytest.param(one, marks=pytest.mark.slow) for one in FAMILIES]
)
def test_greedy_tokens(models: Path, family: str, kernels: str) -> None:
    """With chunks and preemption."""
    path = model(models, family)
    settings = {"max_model_len": 128, "chunk_size": 24, "kernels": kernels, "speculation": "ngram"}
    core = engine(path, 11, **settings)
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    for number, prompt in enumerate(prompts()):
        add(core, str(number), prompt, params=params)
    events = run(core)
    wanted = {str(n): greedy_of_transformers(path, tuple(prompt), 40) for n, prompt in enumerate(prompts())}
    assert tokens_of(events) == wanted
    assert num_drafted(events) > 0
    assert_idle(core)


@pytest.mark.parametrize("kernels", KERNELS)
def test_drawn_tokens(models: Path, kernels: str) -> None:
    """A few likely tokens at each place: drafts come true by chance, and both sides draw the same."""
    answers = []
    for speculation in ("none", "ngram"):
        core = engine(model(models, "llama"), 32, kernels=kernels, max_model_len=128, speculation=speculation)
        for number, prompt in enumerate(prompts()):
            params = SamplingParams(temperature=0.7, top_k=2, seed=number, max_tokens=60, ignore_eos=True)
            add(core, str(number), prompt, params=params)
        events = run(core)
        answers.append(tokens_of(events))
    assert answers[0] == answers[1]
    assert num_drafted(events) > 0
