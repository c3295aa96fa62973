"""Decoders that run on transformers' code: what the list says is what is so."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from common.config import EngineSettings
from common.errors import StartupError
from common.sampling import SamplingParams
from engine import messages as m
from engine.core import EngineCore
from engine.model_runner import ModelRunner
from engine.models.transformers_model import TransformersModel
from engine.models.verified import COMPARED_WITH, REFUSED, VERIFIED
from kv_store.base import ConnectorConfig
from kv_store.memory import MemoryConnector
from tests.engine.fakes import add, assert_idle, run, tokens_of
from tests.engine.kernels.variants import VARIANTS, best_and_slow_others
from tests.engine.tiny_models import Progress, advance, edit_config, make_model, make_runner
from tests.models.survey import SIZES, VARIATIONS, _built, _compare, _small, _write, candidates, examine

NAMES = candidates()
SERVED = sorted(VERIFIED)
# Parallel blocks and scaled logits, windows of some layers, latents and a linear layer that is never called, experts,
# learned positions, partial rotation, a head that asks the decoder inside its model.
QUICK = ["cohere", "cohere2", "longcat_flash", "granitemoe", "gpt2", "gpt_neox", "olmo2", "opt"]


@pytest.mark.parametrize("model_type", QUICK)
def test_equal_to_transformers(tmp_path: Path, model_type: str) -> None:
    assert examine(model_type, tmp_path) == ""


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [each for each in SERVED if each not in QUICK])
def test_all_that_are_served_are_equal(tmp_path: Path, model_type: str) -> None:
    assert examine(model_type, tmp_path) == ""


def test_each_type_is_served_or_refused() -> None:
    if transformers.__version__ != COMPARED_WITH:
        pytest.skip(f"the lists are those of transformers {COMPARED_WITH}")
    assert NAMES.keys() == VERIFIED.keys() | REFUSED.keys()
    assert not VERIFIED.keys() & REFUSED.keys()
    assert {model_type: NAMES[model_type] for model_type in VERIFIED} == VERIFIED


@pytest.mark.parametrize("model_type", ["bert", "mamba", "falcon", "gpt_oss", "deepseek_v32"])
def test_a_refused_one_is_told_why(tmp_path: Path, model_type: str) -> None:
    path = make_model(tmp_path / "model")
    edit_config(path, architectures=[NAMES[model_type]], model_type=model_type)
    with pytest.raises(StartupError) as caught:
        make_runner(path)
    assert f"model type {model_type} is not supported: {REFUSED[model_type]}" in caught.value.message


LATENT = {"deepseek_v2", "deepseek_v3"}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "mscale": 0.8,
    "mscale_all_dim": 0.6,
}
GROUPS = {"n_group": 2, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5}


@pytest.mark.parametrize(
    ("model_type", "flags"),
    [
        ("deepseek_v2", {"topk_method": "group_limited_greedy", "rope_parameters": YARN, **GROUPS}),
        ("deepseek_v3", {"rope_interleave": False, "rope_parameters": YARN, **GROUPS}),
        pytest.param("deepseek_v2", {"q_lora_rank": None}, marks=pytest.mark.slow),
        pytest.param("deepseek_v3", {"q_lora_rank": None, "first_k_dense_replace": 0}, marks=pytest.mark.slow),
    ],
)
def test_latent_attention_as_checkpoints_have_it(tmp_path: Path, model_type: str, flags: dict[str, object]) -> None:
    """Scaled positions, experts in groups, queries with and without a latent of their own."""
    _compare(model_type, tmp_path, {"num_key_value_heads": 4, "n_routed_experts": 8, **flags})


def test_a_block_holds_latents(tmp_path: Path) -> None:
    """Of each token one row, however many heads there are."""
    runner = make_runner(small("deepseek_v3", tmp_path / "model"))
    assert runner.spec.block_shape == (4, 1, 1, 16, 24 + 16)
    assert runner.kv_cache[0].numel() * 4 == runner.spec.block_bytes == 4 * 16 * 40 * 4
    assert runner.spec.fingerprint() != replace(runner.spec, num_planes=2).fingerprint()


def small(model_type: str, path: Path) -> Path:
    model = _built(_small(model_type, {**SIZES, **VARIATIONS[1 if model_type in LATENT else 0]}))
    _write(model, path)
    return path


def test_a_quantised_checkpoint_is_refused(tmp_path: Path) -> None:
    path = small("olmo2", tmp_path / "model")
    edit_config(path, quantization_config={"quant_method": "gptq"})
    with pytest.raises(StartupError, match="quantization_config"):
        make_runner(path)


def test_a_model_type_of_another_architecture_is_refused(tmp_path: Path) -> None:
    path = small("olmo2", tmp_path / "model")
    edit_config(path, model_type="cohere")
    with pytest.raises(StartupError, match=r"architecture .*Olmo2ForCausalLM.* is not supported"):
        make_runner(path)


def test_a_tensor_that_is_missing_is_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = small("olmo2", tmp_path / "model")
    tensors = load_file(path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(StartupError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        make_runner(path)


def greedy(path: Path, prompt: list[int], num_tokens: int) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(num_tokens):
            tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("kernels", best_and_slow_others)
@pytest.mark.parametrize("model_type", ["cohere2", "olmo2", pytest.param("deepseek_v3", marks=pytest.mark.slow)])
def test_preempted_and_from_the_prefix_cache(tmp_path: Path, model_type: str, kernels: str) -> None:
    path = small(model_type, tmp_path / "model")
    values = {"dtype": "float32", "num_blocks": 9, "max_model_len": 128, "chunk_size": 24, "num_threads": 1}
    settings = EngineSettings.model_validate({**values, "kernels": kernels})
    runner = ModelRunner(path, settings)
    assert isinstance(runner._model, TransformersModel)
    ticks = iter(range(10**9))
    connector = MemoryConnector(ConnectorConfig(epoch="e1", worker_id="test"))
    core = EngineCore(settings, runner, connector, lambda: float(next(ticks)), lambda: None)
    prompts = {str(n): [3 + (n * 7 + i * i) % 90 for i in range(length)] for n, length in enumerate((61, 20, 43, 33))}
    wanted = {name: greedy(path, prompt, 30) for name, prompt in prompts.items()}
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    for name, prompt in prompts.items():
        add(core, name, prompt, params=params)
    events = run(core)
    assert tokens_of(events) == wanted
    assert max(event.num_preemptions for event in events if isinstance(event, m.TokensGenerated)) > 0
    add(core, "warm", prompts["0"], params=params)
    assert tokens_of(run(core))["warm"] == wanted["0"]
    assert_idle(core)


def test_kernels_compute_its_linear_layers(tmp_path: Path) -> None:
    if not VARIANTS:
        pytest.skip("no kernels were built")
    path = small("olmo2", tmp_path / "model")
    prompt = list(range(3, 40))
    results = []
    for quantization in ("none", "int8"):
        runner = make_runner(path, quantization=quantization)
        sequence = Progress(prompt, [4, 2, 7])
        advance(runner, [sequence], [len(prompt)])
        results.append(sequence.logprobs[len(prompt) - 1])
    assert 1e-4 < (results[0] - results[1]).abs().mean() < 1


@pytest.mark.parametrize(
    ("model_type", "left"),
    [
        ("gpt2", "Embedding: "),
        ("granitemoe", "Embedding: 6144, GraniteMoeExperts: "),
    ],  # Conv1D and a tied head; experts
)
def test_what_is_not_quantised_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, model_type: str, left: str
) -> None:
    if not VARIANTS:
        pytest.skip("no kernels were built")
    path = small(model_type, tmp_path / "model")
    prompt = list(range(3, 40))
    results = []
    for quantization in ("none", "int8"):
        with caplog.at_level(logging.INFO):
            runner = make_runner(path, quantization=quantization)
        sequence = Progress(prompt, [4, 2, 7])
        advance(runner, [sequence], [len(prompt)])
        results.append(sequence.logprobs[len(prompt) - 1])
    assert 1e-4 < (results[0] - results[1]).abs().mean() < 1
    (record,) = [record for record in caplog.records if "weights are quantised, but" in record.message]
    assert vars(record)["in_full_precision"].startswith(left)
    assert 0 < vars(record)["quantised_percent"] < 100
