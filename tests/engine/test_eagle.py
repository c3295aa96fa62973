"""EAGLE heads: read as they are published, they guess what the published math guesses, and whatever that is, answers
are what they are without them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from common.config import EngineSettings
from common.errors import StartupError
from common.sampling import SamplingParams
from engine.local.device import LocalDevice
from engine.local.drafter import load_drafter
from engine.local.eagle import EagleDrafter, make_cache
from engine.local.eagle_head import head_of
from engine.request import Request
from tests.engine import eagle_heads
from tests.engine.eagle_heads import Weights, head_config
from tests.engine.kernels.variants import torch_best_and_slow_others
from tests.engine.test_medusa import NUM_TOKENS, answers, greedy, prompts, runner
from tests.engine.test_model_families import greedy_of_transformers
from tests.engine.tiny_models import BLOCK_SIZE, make_model

HIDDEN = 96


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "llama", {"hidden_size": HIDDEN})


@pytest.fixture(scope="module")
def model(path: Path) -> PreTrainedModel:
    return eagle_heads.load(path)


def drafter_of(device: LocalDevice, weights: Weights, num_blocks: int = 32, cost: float = 0.01) -> EagleDrafter:
    head = head_of(head_config(HIDDEN), weights, device, "head")
    cache = make_cache(head, device, num_blocks).fill_(float("nan"))  # what was never written must not show
    return EagleDrafter(device, head, cost, cache)


class Recorded:
    """What a drafter guessed: the tokens before, the first that its layer sees, and the guess."""

    def __init__(self, drafter: EagleDrafter) -> None:
        self._drafter = drafter
        self.cost = drafter.cost
        self.follow = drafter.follow
        self.guesses: list[tuple[list[int], int, list[int]]] = []

    def draft(self, lengths: Mapping[Request, int]) -> dict[Request, list[int]]:
        drafts = self._drafter.draft(lengths)
        for request, draft in drafts.items():
            assert len(draft) == lengths[request]
            self.guesses.append((list(request.token_ids), self._drafter._runs[request].start, draft))
        return drafts


def assert_nothing_is_left(drafter: EagleDrafter) -> None:
    drafter.follow([])
    assert sorted(drafter._free) == list(range(len(drafter._cache)))


@pytest.mark.parametrize("kernels", torch_best_and_slow_others)
def test_guesses_are_those_of_the_published_math(
    path: Path, model: PreTrainedModel, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of prompts in chunks, after the prefix cache, and beside each other."""
    monkeypatch.setattr("engine.local.loading.free_rows", lambda *_, **__: 1e6)  # so that wrong guesses pay, too
    device = runner(path, kernels=kernels)
    weights = eagle_heads.random_weights(model)
    drafter = drafter_of(device, weights, cost=0.0)
    recorded = Recorded(drafter)
    answers(path, device, recorded, greedy())
    assert len(recorded.guesses) > 20
    assert {start for _, start, _ in recorded.guesses} == {0, 2 * BLOCK_SIZE}  # of 40 tokens, two blocks are cached
    assert max(len(guess) for _, _, guess in recorded.guesses) == 8
    for text, start, guess in recorded.guesses:
        assert guess == eagle_heads.guesses(model, weights, text, len(guess), start), len(text)
    assert_nothing_is_left(drafter)


@pytest.mark.parametrize("kernels", torch_best_and_slow_others)
def test_heads_that_are_right_are_followed(path: Path, model: PreTrainedModel, kernels: str) -> None:
    wanted = [greedy_of_transformers(path, tuple(prompt), NUM_TOKENS) for prompt in prompts()]
    device = runner(path, kernels=kernels)
    texts = [[*prompt, *answer] for prompt, answer in zip(prompts(), wanted, strict=True)]
    drafter = drafter_of(device, eagle_heads.right_weights(model, texts))
    given, num_drafted, num_accepted = answers(path, device, drafter, greedy())
    assert given == {f"{number} {turn}": answer for number, answer in enumerate(wanted) for turn in range(2)}
    assert num_drafted > 2 * NUM_TOKENS
    assert num_accepted >= 0.8 * num_drafted
    assert_nothing_is_left(drafter)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_heads_that_are_wrong_change_nothing(path: Path, model: PreTrainedModel, temperature: float) -> None:
    """In a cache for one of the requests, too, and with few blocks for the head."""
    params = SamplingParams(temperature=temperature, seed=4, max_tokens=NUM_TOKENS, ignore_eos=True)
    expected, _, _ = answers(path, runner(path), None, params)
    for num_blocks, mode in ((32, "recompute"), (6, "recompute"), (6, "swap")):
        device = runner(path, swap_space_gb=0.01)
        drafter = drafter_of(device, eagle_heads.random_weights(model), num_blocks=min(num_blocks, 8))
        given, num_drafted, num_accepted = answers(
            path, device, drafter, params, num_blocks, preemption_mode=mode, swap_space_gb=0.01
        )
        assert given == expected
        assert 0 <= num_accepted < num_drafted
        assert_nothing_is_left(drafter)


def test_a_request_that_declines_is_not_followed(path: Path, model: PreTrainedModel) -> None:
    device = runner(path)
    drafter = drafter_of(device, eagle_heads.random_weights(model))
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, speculate=False)
    _, num_drafted, _ = answers(path, device, drafter, params)
    assert num_drafted == 0
    assert not drafter._runs


def settings_of(path: Path, speculation: Path) -> EngineSettings:
    values = {"model": str(path), "speculation": str(speculation), "block_size": BLOCK_SIZE, "dtype": "float32"}
    return EngineSettings.model_validate(values)


@pytest.mark.parametrize("form", ["bin", "safetensors", "parts", "vllm"])
def test_published_forms(path: Path, model: PreTrainedModel, tmp_path: Path, form: str) -> None:
    weights, config = eagle_heads.random_weights(model), head_config(HIDDEN)
    if form == "parts":
        for number, names in enumerate((["fc.weight", "fc.bias"], [name for name in weights if "fc." not in name])):
            part = {name: weights[name] for name in names}
            eagle_heads.write(tmp_path, part, config, file=f"model-0000{number + 1}-of-00002.safetensors")
    elif form == "vllm":
        renamed = {f"model.{name}": weight for name, weight in weights.items()}
        eagle_heads.write(tmp_path, renamed, {**config, "architectures": ["EagleLlamaForCausalLM"]})
    else:
        eagle_heads.write(tmp_path, weights, config, file="pytorch_model.bin" if form == "bin" else "model.safetensors")
    drafter = load_drafter(settings_of(path, tmp_path), runner(path))
    assert isinstance(drafter, EagleDrafter)
    assert 0 < drafter.cost < 1
    device = runner(path)
    recorded = Recorded(load_again(path, tmp_path, device))
    answers(path, device, recorded, greedy())
    text, start, guess = recorded.guesses[-1]
    assert guess == eagle_heads.guesses(model, weights, text, len(guess), start)


def load_again(path: Path, folder: Path, device: LocalDevice) -> EagleDrafter:
    drafter = load_drafter(settings_of(path, folder), device)
    assert isinstance(drafter, EagleDrafter)
    return drafter


def test_without_an_embedding_of_its_own_it_takes_the_model_s(path: Path, model: PreTrainedModel) -> None:
    weights = eagle_heads.random_weights(model)
    device = runner(path)
    recorded = Recorded(drafter_of(device, {n: w for n, w in weights.items() if n != "embed_tokens.weight"}))
    answers(path, device, recorded, greedy())
    text, start, guess = recorded.guesses[-1]
    assert guess == eagle_heads.guesses(model, weights, text, len(guess), start)


@pytest.mark.parametrize(
    ("change", "config", "words"),
    [
        ({"fc.weight": None}, {}, "head lacks tensor fc.weight"),
        ({"layers.0.mlp.up_proj.weight": None}, {}, "lacks tensor layers.0.mlp.up_proj.weight"),
        ({"fc.weight": (96, 191)}, {}, r"fc.weight has shape \[96, 191\], not \[96, 192\]"),
        ({"layers.1.mlp.up_proj.weight": (2, 2)}, {}, "has tensor layers.1.mlp.up_proj.weight, which no EAGLE head"),
        ({"embed_tokens.weight": (95, 96)}, {}, "embed_tokens.weight is for fewer than the model's 96 tokens"),
        ({}, {"num_hidden_layers": 2}, "num_hidden_layers is 2"),
        ({}, {"hidden_size": 64}, "hidden_size is 64, that of the model is 96"),
        ({}, {"hidden_act": "relu"}, "head: config.json: hidden_act 'relu' is not supported"),
    ],
)
def test_what_is_wrong_is_named(
    path: Path, model: PreTrainedModel, change: dict[str, tuple[int, ...] | None], config: dict[str, object], words: str
) -> None:
    weights = eagle_heads.random_weights(model)
    for name, shape in change.items():
        if shape is None:
            del weights[name]
        else:
            weights[name] = torch.zeros(shape)
    with pytest.raises(StartupError, match=words):
        head_of({**head_config(HIDDEN), **config}, weights, runner(path), "head")


def test_a_directory_without_a_head_s_file(path: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["EagleLlamaForCausalLM"]}')
    with pytest.raises(StartupError, match=r"an EAGLE head is in none of model.safetensors, pytorch_model.bin"):
        load_drafter(settings_of(path, tmp_path), runner(path))
