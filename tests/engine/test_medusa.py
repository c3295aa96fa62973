"""Medusa heads: read as they are published, and whatever they guess, answers are what they are without them."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from common.config import EngineSettings
from common.errors import StartupError
from common.sampling import SamplingParams
from engine import messages as m
from engine.local.device import LocalDevice
from engine.local.drafter import load_drafter
from engine.local.medusa import MedusaDrafter, heads_of
from engine.speculation.speculation import Drafter
from engine.step import StepRow
from tests.engine.kernels.variants import torch_best_and_slow_others
from tests.engine.medusa_heads import random_heads, random_weights, right_weights
from tests.engine.test_model_engine import engine
from tests.engine.test_model_families import greedy_of_transformers
from tests.engine.tiny_models import BLOCK_SIZE, VOCAB_SIZE, make_model, make_runner
from tests.support.fake_device import add, assert_idle, run, tokens_of

NUM_TOKENS = 20


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "llama", {"hidden_size": 96})


def runner(path: Path, num_blocks: int = 32, **settings: object) -> LocalDevice:
    return make_runner(path, num_blocks=num_blocks, **{"max_model_len": 128, **settings})


def prompts() -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in (40, 7)]


def events_of(
    path: Path, device: LocalDevice, drafter: Drafter | None, params: SamplingParams, **settings: object
) -> list[m.TokensGenerated]:
    """Of the prompts together, then again from the prefix cache."""
    given = {"max_model_len": 128, "chunk_size": 24, **settings}
    core = engine(path, device.info.num_blocks, device=device, drafter=drafter, **given)
    events: list[m.Event] = []
    for turn in range(2):
        for number, prompt in enumerate(prompts()):
            add(core, f"{number} {turn}", prompt, params=params)
        events += run(core)
    assert_idle(core)
    return [one for one in events if isinstance(one, m.TokensGenerated)]


def answers(
    path: Path, device: LocalDevice, drafter: Drafter | None, params: SamplingParams, **settings: object
) -> tuple[dict[str, list[int]], int, int]:
    """Tokens; how many were guessed, and rightly."""
    events = events_of(path, device, drafter, params, **settings)
    last = [one for one in events if one.finish_reason]
    return tokens_of(events), sum(one.num_drafted_tokens for one in last), sum(one.num_accepted_tokens for one in last)


def greedy() -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.mark.parametrize("kernels", torch_best_and_slow_others)
def test_heads_that_are_right_are_followed(path: Path, kernels: str) -> None:
    wanted = [greedy_of_transformers(path, tuple(prompt), NUM_TOKENS) for prompt in prompts()]
    device = runner(path, kernels=kernels)
    texts = [[*prompt, *answer] for prompt, answer in zip(prompts(), wanted, strict=True)]
    weights = right_weights(device, texts, 3)
    heads = [head for head, _ in heads_of(weights, device, "right heads")]
    given, num_drafted, num_accepted = answers(path, device, MedusaDrafter(device, heads, cost=0.01), greedy())
    assert given == {f"{number} {turn}": answer for number, answer in enumerate(wanted) for turn in range(2)}
    assert num_drafted > 2 * NUM_TOKENS
    assert num_accepted >= 0.8 * num_drafted


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_heads_that_are_wrong_change_nothing(path: Path, temperature: float) -> None:
    """In a cache for one of the requests, too."""
    params = SamplingParams(temperature=temperature, seed=4, max_tokens=NUM_TOKENS, ignore_eos=True)
    expected, _, _ = answers(path, runner(path), None, params)
    for num_blocks in (32, 5):
        device = runner(path, num_blocks, max_model_len=70)
        drafter = MedusaDrafter(device, random_heads(device, 2), cost=0.01)
        given, num_drafted, num_accepted = answers(path, device, drafter, params)
        assert given == expected
        assert 0 <= num_accepted < num_drafted


def test_a_state_is_known_for_the_step_after_its_own(path: Path) -> None:
    device = runner(path)
    device.keep_states()
    rows = [
        StepRow(token_ids=[5, 6, 7], num_computed_tokens=0, block_ids=[3]),
        StepRow(token_ids=[8], num_computed_tokens=0, block_ids=[4]),
    ]
    device.execute(rows)
    first, second = device.row_of_state([3], 2), device.row_of_state([4], 0)
    assert first is not None
    assert second is not None
    both = device.states([first, second])
    assert both.shape == (2, 96)
    assert device.row_of_state([3], 1) is None, "only of the last token of a row"
    device.execute(rows[1:])
    assert device.row_of_state([3], 2) is None
    again = device.row_of_state([4], 0)
    assert again is not None
    torch.testing.assert_close(device.states([again])[0], both[1])


def vllm_name(name: str) -> str:
    number, place, *rest = name.split(".")
    return f"blocks.{number}.layers.{place}.{rest[1]}" if rest[0] == "linear" else f"lm_heads.{number}.weight"


@pytest.mark.parametrize("form", ["pt", "safetensors", "vllm"])
def test_published_forms(path: Path, tmp_path: Path, form: str) -> None:
    weights = random_weights(runner(path), 3)
    if form == "pt":
        torch.save(weights, tmp_path / "medusa_lm_head.pt")
    elif form == "safetensors":
        save_file(weights, tmp_path / "medusa_lm_head.safetensors")
    else:
        save_file({vllm_name(name): weight for name, weight in weights.items()}, tmp_path / "model.safetensors")
    config = {"model_type": "medusa", "num_heads": 3} if form == "vllm" else {"medusa_num_heads": 3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    device = runner(path)
    settings = EngineSettings.model_validate(
        {"model": str(path), "speculation": str(tmp_path), "block_size": BLOCK_SIZE, "dtype": "float32"}
    )
    drafter = load_drafter(settings, device)
    assert isinstance(drafter, MedusaDrafter)
    assert 0 < drafter.cost < 1
    expected = [head for head, _ in heads_of(weights, device, "heads")]
    states = torch.randn(5, 96, generator=torch.Generator().manual_seed(1))
    for ours, theirs in zip(drafter._heads, expected, strict=True):
        assert ours.best_tokens(states).tolist() == theirs.best_tokens(states).tolist()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"1.1.weight": None}, "lacks what names the tokens of head 1"),
        (
            {"0.1.weight": None, "0.0.linear.weight": None, "0.0.linear.bias": None},
            r"has the heads \[1\], not those from 0",
        ),
        ({"1.0.linear.weight": None}, "lacks the weight of block 0 of head 1"),
        ({"1.1.weight": (VOCAB_SIZE, 95)}, r"1.1.weight has shape \[\d+, 95\], the model needs \[\d+, 96\]"),
        ({"fc.weight": (2, 2)}, "has tensor fc.weight, which no Medusa head has"),
    ],
)
def test_what_is_wrong_is_named(path: Path, change: dict[str, tuple[int, ...] | None], words: str) -> None:
    device = runner(path)
    weights = random_weights(device, 2)
    for name, shape in change.items():
        if shape is None:
            del weights[name]
        else:
            weights[name] = torch.zeros(shape)
    with pytest.raises(StartupError, match=words):
        heads_of(weights, device, "--speculation file")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "Medusa heads are in none of medusa_lm_head.safetensors"),
        (b"no file of torch's", "medusa_lm_head.pt (cannot be read|is no file of tensors)"),
    ],
)
def test_files_that_are_no_heads(path: Path, tmp_path: Path, content: bytes | None, words: str) -> None:
    (tmp_path / "config.json").write_text('{"medusa_num_heads": 2}')
    if content is not None:
        (tmp_path / "medusa_lm_head.pt").write_bytes(content)
    settings = EngineSettings.model_validate({"model": str(path), "speculation": str(tmp_path)})
    with pytest.raises(StartupError, match=words):
        load_drafter(settings, runner(path))
