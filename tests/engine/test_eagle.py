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
from engine.local.eagle_files import head_of, layers_of
from engine.request import Request, block_table
from engine.step import StepRow
from tests.engine import eagle_heads
from tests.engine.eagle_heads import Weights, head_config
from tests.engine.kernels.variants import VARIANTS, torch_best_and_slow_others
from tests.engine.test_medusa import NUM_TOKENS, answers, events_of, greedy, prompts, runner
from tests.engine.test_model_families import greedy_of_transformers
from tests.engine.tiny_models import BLOCK_SIZE, make_model
from tests.support.fake_device import tokens_of

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


KINDS = {"eagle": eagle_heads.random_weights, "eagle3": eagle_heads.random_weights_3}


@pytest.mark.parametrize("kernels", torch_best_and_slow_others)
@pytest.mark.parametrize("kind", KINDS)
def test_guesses_are_those_of_the_published_math(
    path: Path, model: PreTrainedModel, kind: str, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of prompts in chunks, after the prefix cache, and beside each other."""
    monkeypatch.setattr("engine.local.loading.free_rows", lambda *_, **__: 1e6)  # so that wrong guesses pay, too
    device = runner(path, kernels=kernels)
    weights = KINDS[kind](model)
    drafter = drafter_of(device, weights, cost=0.0)
    recorded = Recorded(drafter)
    answers(path, device, recorded, greedy())
    assert len(recorded.guesses) > 20
    assert {start for _, start, _ in recorded.guesses} == {0, 2 * BLOCK_SIZE}  # of 40 tokens, two blocks are cached
    assert max(len(guess) for _, _, guess in recorded.guesses) == 8
    for text, start, guess in recorded.guesses[::4]:
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


@pytest.mark.parametrize("kernels", torch_best_and_slow_others)
def test_an_eagle_3_head_that_is_right_is_followed(path: Path, model: PreTrainedModel, kernels: str) -> None:
    wanted = [greedy_of_transformers(path, tuple(prompt), NUM_TOKENS) for prompt in prompts()]
    device = runner(path, kernels=kernels)
    texts = [[*prompt, *answer] for prompt, answer in zip(prompts(), wanted, strict=True)]
    drafter = drafter_of(device, eagle_heads.right_weights_3(model, texts))
    given, num_drafted, num_accepted = answers(path, device, drafter, greedy(), speculation_tokens=1)
    assert given == {f"{number} {turn}": answer for number, answer in enumerate(wanted) for turn in range(2)}
    assert num_drafted > NUM_TOKENS
    assert num_accepted >= 0.8 * num_drafted


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options", [{"temperature": 0.0}, {"temperature": 0.8}, {"temperature": 0.7, "repetition_penalty": 1.5}], ids=str
)
def test_heads_that_are_wrong_change_nothing(
    path: Path, model: PreTrainedModel, kind: str, options: dict[str, float]
) -> None:
    """In a cache for one of the requests, too, and with few blocks for the head."""
    params = SamplingParams(**options, seed=4, max_tokens=NUM_TOKENS, ignore_eos=True)  # type: ignore[arg-type]
    expected, _, _ = answers(path, runner(path), None, params)
    for num_blocks, mode in ((32, "recompute"), (5, "recompute"), (5, "swap")):
        device = runner(path, num_blocks, max_model_len=70, swap_space_gb=0.01)
        drafter = drafter_of(device, KINDS[kind](model), num_blocks=min(num_blocks, 8))
        events = events_of(path, device, drafter, params, preemption_mode=mode, swap_space_gb=0.01)
        assert tokens_of(events) == expected
        assert (max(one.num_preemptions for one in events) > 0) is (num_blocks == 5)
        assert sum(one.num_drafted_tokens for one in events if one.finish_reason) > 0
        assert_nothing_is_left(drafter)


@pytest.mark.skipif(not VARIANTS, reason="no kernels were built")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("settings", [{"dtype": "bfloat16"}, {"dtype": "bfloat16", "quantization": "int8"}], ids=str)
def test_other_precisions(path: Path, model: PreTrainedModel, kind: str, settings: dict[str, str]) -> None:
    given = {"kernels": VARIANTS[-1], **settings}
    expected, _, _ = answers(path, runner(path, **given), None, greedy(), **settings)
    device = runner(path, **given)
    recorded = Recorded(drafter_of(device, KINDS[kind](model)))
    tokens, num_drafted, _ = answers(path, device, recorded, greedy(), **settings)
    assert tokens == expected
    assert num_drafted > 0


def test_a_request_that_declines_is_not_followed(path: Path, model: PreTrainedModel) -> None:
    device = runner(path)
    drafter = drafter_of(device, eagle_heads.random_weights(model))
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, speculate=False)
    _, num_drafted, _ = answers(path, device, drafter, params)
    assert num_drafted == 0
    assert not drafter._runs


def test_a_run_has_no_gaps(path: Path, model: PreTrainedModel) -> None:
    """It goes on with what the last step computed, else it begins anew; a request that does not run has none."""
    device = runner(path)
    drafter = drafter_of(device, eagle_heads.random_weights(model))
    params = SamplingParams(temperature=0.0, max_tokens=9)
    request = Request(
        request_id="a",
        token_ids=prompts()[0],
        num_prompt_tokens=40,
        sampling_params=params,
        arrival_time=0.0,
        block_ids=block_table([3, 1, 2]),
    )

    def step(start: int, stop: int) -> tuple[int, int] | None:
        row = StepRow(token_ids=request.token_ids[start:stop], num_computed_tokens=start, block_ids=request.block_ids)
        device.execute([row])
        request.num_computed_tokens = stop
        drafter.follow([request])
        run = drafter._runs.get(request)
        return None if run is None else (run.start, run.end)

    assert step(16, 20) == (16, 20)
    assert step(20, 25) == (16, 25)
    assert step(28, 30) == (28, 30), "nobody saw 25 to 27"
    assert step(28, 39) == (28, 39), "two tokens were computed again"
    request.num_computed_tokens = 10  # it lost its blocks, and found others
    drafter.follow([request])
    assert not drafter._runs
    assert step(10, 12) == (10, 12)
    assert_nothing_is_left(drafter)


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


def changed(weights: Weights, change: Mapping[str, tuple[int, ...] | None]) -> Weights:
    zeros = {name: torch.zeros(shape) for name, shape in change.items() if shape is not None}
    return {name: weight for name, weight in weights.items() if name not in change} | zeros


def test_an_eagle_3_head_may_be_another_s_form(path: Path, model: PreTrainedModel) -> None:
    """Without `d2t` and a head: it names all tokens by the model's head. With the layer's config apart."""
    weights = eagle_heads.random_weights_3(model)
    head = model.get_output_embeddings().weight.detach().clone()
    whole = {**weights, "lm_head.weight": head, "d2t": torch.zeros(len(head), dtype=torch.long)}
    given = {
        name.replace("midlayer.", "layers.0."): weight
        for name, weight in whole.items()
        if name not in ("d2t", "t2d", "lm_head.weight")
    }
    device, config = runner(path), head_config(HIDDEN)
    drafter_head = head_of({**config, "transformer_layer_config": config}, given, device, "head")
    recorded = Recorded(EagleDrafter(device, drafter_head, 0.01, make_cache(drafter_head, device, 32)))
    answers(path, device, recorded, greedy())
    text, start, guess = recorded.guesses[-1]
    assert guess == eagle_heads.guesses(model, whole, text, len(guess), start)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"norm.weight": None}, "lacks tensor norm.weight"),
        ({"midlayer.hidden_norm.weight": None}, "lacks tensor midlayer.hidden_norm.weight"),
        ({"fc.weight": (96, 192)}, r"fc.weight has shape \[96, 192\], not \[96, 288\]"),
        ({"d2t": (59,)}, r"tensor d2t has shape \[59\], the head is for 60"),
        ({"lm_head.weight": (97, 96), "d2t": None, "midlayer.self_attn.rotary_emb.inv_freq": (4,)}, "is for 97 tokens"),
        ({"lm_head.weight": (97, 96), "d2t": (97,)}, "d2t names tokens that are none of the model's 96"),
    ],
)
def test_what_is_wrong_with_an_eagle_3_head_is_named(
    path: Path, model: PreTrainedModel, change: dict[str, tuple[int, ...] | None], words: str
) -> None:
    with pytest.raises(StartupError, match=words):
        head_of(head_config(HIDDEN), changed(eagle_heads.random_weights_3(model), change), runner(path), "head")


def test_which_layers_an_eagle_3_head_continues() -> None:
    ids = "eagle_aux_hidden_state_layer_ids"
    assert layers_of({}, 32, "head") == [2, 16, 29]
    assert layers_of({ids: [1, 9]}, 10, "head") == [1, 9]
    assert layers_of({"eagle_config": {ids: [1, 7]}}, 10, "head") == [2, 8], "behind those layers"
    for config, words in (
        ({}, r"the layers \[2, 2, 1\] begin with, the model has 4 layers"),
        ({ids: [0, 4]}, "the model has 4 layers"),
        ({ids: "2"}, "has to be a list of integers"),
    ):
        with pytest.raises(StartupError, match=words):
            layers_of(config, 4, "head")


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
    weights = changed(eagle_heads.random_weights(model), change)
    with pytest.raises(StartupError, match=words):
        head_of({**head_config(HIDDEN), **config}, weights, runner(path), "head")


def test_a_directory_without_a_head_s_file(path: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["EagleLlamaForCausalLM"]}')
    with pytest.raises(StartupError, match=r"an EAGLE head is in none of model.safetensors, pytorch_model.bin"):
        load_drafter(settings_of(path, tmp_path), runner(path))


def test_a_model_that_is_computed_by_transformers_code(tmp_path: Path) -> None:
    """It has states for an EAGLE-1 head, and none for an EAGLE-3 head."""
    path = make_model(tmp_path / "olmo2", {"model_type": "olmo2", "hidden_size": HIDDEN})
    model = eagle_heads.load(path)
    device = runner(path)
    weights = eagle_heads.random_weights(model)
    del weights["embed_tokens.weight"]
    recorded = Recorded(drafter_of(device, weights))
    answers(path, device, recorded, greedy())
    text, start, guess = recorded.guesses[-1]
    assert guess == eagle_heads.guesses(model, weights, text, len(guess), start)
    with pytest.raises(StartupError, match=r"layers \[0, 1, 2\] cannot be asked what they begin with"):
        drafter_of(device, eagle_heads.random_weights_3(model))
