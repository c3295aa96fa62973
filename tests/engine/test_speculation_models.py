"""On real models in float32: greedy answers with speculation are transformers', drawn ones are those without it, and
how often each is drawn follows transformers' logits."""

from __future__ import annotations

import itertools
import json
import random
import shutil
from pathlib import Path

import pytest
import torch

from common.config import EngineSettings
from common.errors import StartupError
from common.sampling import SamplingParams
from engine import messages as m
from engine.core import EngineCore
from engine.local.device import LocalDevice
from engine.local.drafter import load_drafter
from engine.local.eagle import EagleDrafter, make_cache
from engine.local.eagle_files import head_of
from engine.local.medusa import MedusaDrafter
from engine.speculation.draft_model import ModelDrafter, load_draft_model
from tests.engine import eagle_heads
from tests.engine.kernels.variants import torch_best_and_slow_others
from tests.engine.medusa_heads import random_heads
from tests.engine.test_model_engine import engine
from tests.engine.test_model_families import greedy_of_transformers, model
from tests.engine.tiny_models import BLOCK_SIZE, FAMILIES, VOCAB_SIZE, expected_logprobs_of_all, make_model, make_runner
from tests.router.tiny_tokenizer import tokenizer_files
from tests.support.fake_device import add, assert_idle, run, tokens_of

QUICK = ("llama", "gemma2")


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


@pytest.mark.parametrize("kernels", torch_best_and_slow_others)
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


@pytest.mark.parametrize("kernels", torch_best_and_slow_others)
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


def drafting(path: Path, other: Path, draft_blocks: int = 32, num_blocks: int = 32) -> tuple[EngineCore, ModelDrafter]:
    """The model of `path`, for which that of `other` drafts."""
    values = {"dtype": "float32", "block_size": BLOCK_SIZE, "num_threads": 1, "max_model_len": 128}
    runner = LocalDevice(other, EngineSettings.model_validate({**values, "num_blocks": draft_blocks}))
    runner.kv_cache.fill_(float("nan"))
    drafter = ModelDrafter(runner, VOCAB_SIZE, cost=0.05)
    return engine(path, num_blocks, drafter=drafter, max_model_len=128, chunk_size=24), drafter


def answers_of(core: EngineCore, drafter: ModelDrafter) -> tuple[dict[str, list[int]], int, int]:
    """Tokens, and how many were drafted and accepted."""
    for number, prompt in enumerate(prompts()):
        add(core, str(number), prompt, params=SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))
    events = run(core)
    assert_idle(core)
    assert drafter._blocks.check_integrity(one.request for one in drafter._followers.values()) == []
    last = [e for e in events if isinstance(e, m.TokensGenerated) and e.finish_reason]
    return tokens_of(events), sum(e.num_drafted_tokens for e in last), sum(e.num_accepted_tokens for e in last)


def greedy(path: Path) -> dict[str, list[int]]:
    return {str(n): greedy_of_transformers(path, tuple(prompt), 40) for n, prompt in enumerate(prompts())}


def test_a_model_that_drafts_for_itself_is_always_right(models: Path) -> None:
    """Chunks, preemption of the model's requests, and the prefix cache of the draft model included."""
    path = model(models, "llama")
    core, drafter = drafting(path, path, num_blocks=11)
    for _ in range(2):
        tokens, num_drafted, num_accepted = answers_of(core, drafter)
        assert tokens == greedy(path)
        assert num_accepted == num_drafted > 60


@pytest.mark.parametrize("draft_blocks", [8, 32])
def test_a_model_that_drafts_wrongly_changes_nothing(models: Path, draft_blocks: int) -> None:
    path = model(models, "llama")
    core, drafter = drafting(path, model(models, "qwen3"), draft_blocks)
    tokens, num_drafted, num_accepted = answers_of(core, drafter)
    assert tokens == greedy(path)
    assert 0 <= num_accepted < num_drafted


def test_a_draft_model_has_the_models_tokenizer(models: Path, tmp_path: Path) -> None:
    folders = []
    for name in ("a", "b"):
        folders.append(tmp_path / name)
        shutil.copytree(model(models, "llama"), folders[-1])
        (folders[-1] / "tokenizer.json").write_bytes(tokenizer_files()["tokenizer.json"])
    values = {"model": str(folders[0]), "num_blocks": 16, "max_model_len": 64, "dtype": "float32", "num_threads": 1}
    settings = EngineSettings.model_validate({**values, "speculation": str(folders[1])})
    runner = LocalDevice(folders[0], settings)
    drafter = load_draft_model(settings, runner)
    assert drafter is not None
    assert drafter.cost == 1.0
    assert load_drafter(settings.model_copy(update={"speculation": "ngram"}), runner) is None
    other = json.loads((folders[1] / "tokenizer.json").read_text())
    first, second, *_ = vocabulary = other["model"]["vocab"]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (folders[1] / "tokenizer.json").write_text(json.dumps(other))
    with pytest.raises(StartupError, match="has another tokenizer"):
        load_draft_model(settings, runner)


def medusa(path: Path, num_blocks: int) -> EngineCore:
    """The model of `path`, for which heads of random weights guess."""
    runner = make_runner(path, num_blocks=num_blocks, max_model_len=128)
    drafter = MedusaDrafter(runner, random_heads(runner, 3), cost=0.01)
    return engine(path, num_blocks, device=runner, drafter=drafter, max_model_len=128)


def eagle(path: Path, num_blocks: int, *, is_third: bool) -> EngineCore:
    """The model of `path`, for which an EAGLE head of random weights guesses."""
    runner = make_runner(path, num_blocks=num_blocks, max_model_len=128)
    model = eagle_heads.load(path)
    weights = eagle_heads.random_weights_3(model, num_rows=2) if is_third else eagle_heads.random_weights(model)
    head = head_of(eagle_heads.head_config(64), weights, runner, "head")
    drafter = EagleDrafter(runner, head, 0.01, make_cache(head, runner, num_blocks))
    return engine(path, num_blocks, device=runner, drafter=drafter, max_model_len=128)


NUM_DRAWS = 20_000
FEW = 3  # tokens of a vocabulary
ANSWER_LENGTH = 4
TEMPERATURE = 2.0  # so that no answer is rare
CHI_SQUARED_LIMIT = 124.8  # one in a thousand, with 80 degrees of freedom: 3⁴ answers


@pytest.fixture(scope="module")
def odds_of_answers(models: Path) -> torch.Tensor:
    """`[3, 3, 3, 3]`: how likely transformers makes each answer of four tokens to `few_prompt`."""
    beginnings = list(itertools.product(range(FEW), repeat=ANSWER_LENGTH - 1))
    sequences = [[*few_prompt(), *beginning] for beginning in beginnings]
    logprobs = expected_logprobs_of_all(few_tokens(models, "few"), sequences)[:, len(few_prompt()) - 1 :].double()
    logprobs = (logprobs / TEMPERATURE).log_softmax(-1)
    odds = torch.zeros([FEW] * ANSWER_LENGTH, dtype=torch.float64)
    for answer in itertools.product(range(FEW), repeat=ANSWER_LENGTH):
        own = logprobs[beginnings.index(answer[:-1])]
        odds[answer] = sum(own[place, token_id] for place, token_id in enumerate(answer)).exp()
    return odds


def few_prompt() -> list[int]:
    """Has every three of the tokens in a row, so that `ngram` always finds something."""
    return random.Random(8).choices(range(FEW), k=90)


def few_tokens(models: Path, name: str) -> Path:
    if not (models / name).exists():
        make_model(models / name, {"vocab_size": FEW})
    return models / name


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["ngram", "model", "medusa", "eagle", "eagle3"])
def test_the_distribution_is_transformers(
    models: Path, odds_of_answers: torch.Tensor, monkeypatch: pytest.MonkeyPatch, drafter: str
) -> None:
    """Chi-squared of 20,000 drawn answers, of which each token but the first may be a guess. 50 share a step."""
    monkeypatch.setattr("engine.local.loading.free_rows", lambda *_, **__: 1e6)  # so that so many draft at all
    path = few_tokens(models, "few")
    if drafter == "ngram":
        core = engine(path, 256, max_model_len=128, speculation="ngram")
    elif drafter == "medusa":
        core = medusa(path, 256)
    elif drafter in ("eagle", "eagle3"):
        core = eagle(path, 256, is_third=drafter == "eagle3")
    else:
        core, _ = drafting(path, few_tokens(models, "other few"), draft_blocks=256, num_blocks=256)
    counts = torch.zeros_like(odds_of_answers)
    num_drafted = num_accepted = 0
    for first in range(0, NUM_DRAWS, 50):
        for seed in range(first, first + 50):
            params = SamplingParams(seed=seed, temperature=TEMPERATURE, max_tokens=ANSWER_LENGTH, ignore_eos=True)
            add(core, str(seed), few_prompt(), params=params)
        events = run(core)
        for answer in tokens_of(events).values():
            counts[tuple(answer)] += 1
        for event in events:
            if isinstance(event, m.TokensGenerated) and event.finish_reason:
                num_drafted += event.num_drafted_tokens
                num_accepted += event.num_accepted_tokens
    assert counts.sum() == NUM_DRAWS
    assert num_drafted > NUM_DRAWS
    assert NUM_DRAWS // 5 < num_accepted < num_drafted * 0.9, "many guesses are right, and many are wrong"
    wanted = odds_of_answers * NUM_DRAWS
    assert wanted.min() > 5, "chi-squared is no measure of rarer answers"
    assert float(((counts - wanted) ** 2 / wanted).sum()) < CHI_SQUARED_LIMIT
