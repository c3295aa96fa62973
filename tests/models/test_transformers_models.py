"""Decoders that run on transformers' code: what the list says is what is so."""

from __future__ import annotations

import json
import logging
import re
import time
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import AutoModelForCausalLM, Mxfp4Config
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from common.config import EngineSettings
from common.errors import StartupError
from common.model_files import open_model
from common.sampling import SamplingParams
from common.types import SampledToken
from engine import messages as m
from engine.core import EngineCore
from engine.local.device import LocalDevice
from engine.local.memory import weight_bytes
from engine.models.families import FAMILIES
from engine.models.own_layers import Calls, OwnEmbedding, OwnLinear, own_linears
from engine.models.registry import architecture_of, max_positions
from engine.models.text_part import COMPOSITES
from engine.models.transformers_model import TransformersModel
from engine.models.verified import COMPARED_WITH, REFUSED, VERIFIED
from engine.step import StepRow
from kv_store.base import ConnectorConfig
from kv_store.memory import MemoryConnector
from tests.engine.kernels.variants import VARIANTS, best_and_slow_others
from tests.engine.tiny_models import Progress, advance, edit_config, expected_logprobs, make_model, make_runner
from tests.support.fake_device import add, assert_idle, run, tokens_of
from tools.small_models import VARIATIONS, build, save, small_config
from tools.verified_models import (
    NUM_ANSWER_TOKENS,
    PUBLISHED,
    DifferentError,
    candidates,
    compare,
    examine,
    other_names,
)

SERVED = sorted(VERIFIED)
# Parallel blocks and scaled logits, windows of some layers, latents and a linear layer that is never called, experts,
# experts whose weights are transposed, sinks, learned positions, partial rotation, a head that asks the decoder inside
# its model; positions after padding's and a head below another module, positions that the model counts itself, layers
# that attend twice, attention that is made to ask for ours.
QUICK = ["cohere", "cohere2", "longcat_flash", "granitemoe", "aria_text", "gpt_oss", "gpt2", "gpt_neox", "olmo2", "opt"]
QUICK += ["roberta", "bart", "diffllama", "falcon", "gpt_neo"]
names = cache(candidates)  # it imports the configurations of all types


@pytest.mark.parametrize("model_type", QUICK)
def test_equal_to_transformers(tmp_path: Path, model_type: str) -> None:
    assert examine(model_type, tmp_path) == ""


@pytest.mark.parametrize("at", [0, NUM_ANSWER_TOKENS - 1])
def test_another_answer_than_that_of_transformers_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """Also if all logprobs of the prompt are equal: here the sampler takes another token, once."""
    execute, num = LocalDevice.execute, 0

    def taking_another(self: LocalDevice, inputs: list[StepRow]) -> list[SampledToken | None]:
        nonlocal num
        outputs = execute(self, inputs)
        if len(inputs) == 1 and outputs[0] is not None:  # of a free answer
            if num == at:
                outputs = [replace(outputs[0], token_id=outputs[0].token_id ^ 1)]
            num += 1
        return outputs

    monkeypatch.setattr(LocalDevice, "execute", taking_another)
    with pytest.raises(DifferentError, match=f"another token than that of transformers, {at} after the first"):
        compare("olmo2", tmp_path, VARIATIONS[0])


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [each for each in SERVED if each not in QUICK])
def test_all_that_are_served_are_equal(tmp_path: Path, model_type: str) -> None:
    assert examine(model_type, tmp_path) == ""


def test_each_type_is_served_or_refused() -> None:
    if transformers.__version__ != COMPARED_WITH:
        pytest.skip(f"the lists are those of transformers {COMPARED_WITH}")
    assert names().keys() == VERIFIED.keys() | REFUSED.keys()
    assert not VERIFIED.keys() & REFUSED.keys()
    assert {model_type: names()[model_type] for model_type in VERIFIED} == VERIFIED


def test_no_type_of_transformers_is_left_out() -> None:
    """Each is compared, another name of one that is, or computed by Baton's own decoder."""
    others = other_names()
    for model_type, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        assert model_type in names() or model_type in others or name in FAMILIES or name in COMPOSITES, model_type
    assert not names().keys() & others.keys()
    assert others["gpt-sw3"] == "GPT2LMHeadModel"
    assert others["internlm3"] == "LlamaForCausalLM"
    assert "llama" not in others


def test_the_docs_say_what_the_code_says() -> None:
    text = (Path(__file__).parents[2] / "docs/models.md").read_text()
    survey = text.partition("<!-- survey: begin -->")[2].partition("<!-- survey: end -->")[0]
    served, _, refused = survey.partition("are refused:")
    assert f"With transformers {COMPARED_WITH}, {len(VERIFIED)} are served:" in served
    assert dict(re.findall(r"^\| `(\w+)` \| ([\w-]+) \|$", served, re.M)) == {
        name: model_type for model_type, name in VERIFIED.items()
    }
    for model_type, name in other_names().items():
        assert f"`{model_type}` of `{name}`" in served
        assert name in FAMILIES or name in VERIFIED.values()
    assert PUBLISHED.keys() <= VERIFIED.keys()
    for model_type, how in PUBLISHED.items():
        assert f"{model_type} ({how})" in served
    rows = dict(re.findall(r"^\| ([\w-]+) \| (.+) \|$", refused, re.M))
    assert rows.pop("---") == "---"
    assert rows == {model_type: reason.replace("|", "/") for model_type, reason in REFUSED.items()}
    assert f"{len(REFUSED)} are refused:" in survey


@pytest.mark.slow
def test_what_is_refused_is_refused_still(tmp_path: Path) -> None:
    """As many of them as can be built in a minute, from another one on each day."""
    if transformers.__version__ != COMPARED_WITH:
        pytest.skip(f"the lists are those of transformers {COMPARED_WITH}")
    order = sorted(REFUSED)
    start = (time.time_ns() // 86_400_000_000_000 * 7) % len(order)
    end = time.monotonic() + 60
    for model_type in order[start:] + order[:start]:
        assert examine(model_type, tmp_path / model_type) == REFUSED[model_type]
        if time.monotonic() > end:
            break


@pytest.mark.parametrize("model_type", ["bloom", "mamba", "mpt", "zaya", "deepseek_v32"])
def test_a_refused_one_is_told_why(tmp_path: Path, model_type: str) -> None:
    path = make_model(tmp_path / "model")
    edit_config(path, architectures=[names()[model_type]], model_type=model_type)
    with pytest.raises(StartupError) as caught:
        make_runner(path)
    assert f"model type {model_type} is not supported: {REFUSED[model_type]}" in caught.value.message


LATENT = {"deepseek_v2", "deepseek_v3", "minicpm3"}
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
    compare(model_type, tmp_path, {"num_key_value_heads": 4, "n_routed_experts": 8, **flags})


def test_a_block_holds_latents(tmp_path: Path) -> None:
    """Of each token one row, however many heads there are."""
    runner = make_runner(small("deepseek_v3", tmp_path / "model"))
    assert runner.info.spec.block_shape == (4, 1, 1, 16, 24 + 16)
    assert runner.kv_cache[0].numel() * 4 == runner.info.spec.block_bytes == 4 * 16 * 40 * 4
    assert runner.info.spec.fingerprint() != replace(runner.info.spec, num_planes=2).fingerprint()


def small(model_type: str, path: Path) -> Path:
    save(build(small_config(model_type, VARIATIONS[1 if model_type in LATENT else 0])), path)
    return path


def test_a_quantised_checkpoint_is_refused(tmp_path: Path) -> None:
    path = small("olmo2", tmp_path / "model")
    edit_config(path, quantization_config={"quant_method": "gptq"})
    with pytest.raises(StartupError, match=r"quantization_config of gptq is not supported by .* transformers' code"):
        make_runner(path)


def make_mxfp4(path: Path) -> Path:
    """A gpt-oss whose codes and scales are any."""
    save(build(small_config("gpt_oss", {"intermediate_size": 96})), path)
    generator = torch.Generator().manual_seed(5)
    tensors = load_file(path / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, k, n = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = torch.randint(256, (experts, n, k // 32, 16), generator=generator).byte()
        tensors[f"{name}_scales"] = torch.randint(120, 125, (experts, n, k // 32), generator=generator).byte()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    edit_config(path, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    return path


def widened(path: Path) -> torch.nn.Module:
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", quantization_config=Mxfp4Config(dequantize=True)
    )
    return model


@pytest.mark.parametrize("is_kept", [True, False])
def test_the_memory_of_mxfp4_is_that_of_widened_weights(tmp_path: Path, is_kept: bool) -> None:
    path = make_mxfp4(tmp_path / "model")
    num_weights = sum(parameter.numel() for parameter in widened(path).parameters())
    assert weight_bytes(open_model(path), 2, stays_quantised=is_kept) == 2 * num_weights
    assert weight_bytes(open_model(path), 4, stays_quantised=is_kept) == 4 * num_weights


def test_mxfp4_is_widened(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """transformers says what codes and scales mean."""
    path = make_mxfp4(tmp_path / "model")
    prompt = list(range(3, 40))
    sequence = Progress(prompt, [4, 2, 7])
    advance(make_runner(path), [sequence], [len(prompt)])
    with torch.inference_mode():
        expected = widened(path)(torch.tensor([prompt]), use_cache=False).logits[0, -1].log_softmax(-1)
    torch.testing.assert_close(sequence.logprobs[len(prompt) - 1], expected, atol=1e-4, rtol=1e-4)
    (said,) = [record for record in caplog.records if "mxfp4 weights are widened" in record.message]
    assert vars(said)["memory_of_the_file"] == "8 times"  # four bits become a float32


LONGROPE = {
    "type": "longrope",  # as published checkpoints spell it
    "short_factor": [1.0, 1.1, 1.3, 1.5, 2.0, 2.5, 2.6, 2.7],
    "long_factor": [2.0, 2.5, 3.0, 4.0, 6.0, 9.0, 9.5, 10.0],
    "original_max_position_embeddings": 64,
}


def with_longrope(model_type: str, path: Path) -> Path:
    small(model_type, path)
    scales = {"short_mscale": 1.1, "long_mscale": 1.4} if model_type == "phimoe" else {}
    edit_config(path, rope_parameters=None, rope_theta=10000.0, rope_scaling={**LONGROPE, **scales})
    return path


@pytest.mark.parametrize("model_type", ["minicpm3", "phimoe", "olmo2"])
def test_longrope_is_chosen_by_the_longest_sequence(tmp_path: Path, model_type: str) -> None:
    """As transformers chooses for a sequence of that length; whole, in chunks and token by token."""
    path = with_longrope(model_type, tmp_path / "model")
    prints = set()
    for max_model_len, length in ((256, 90), (64, 60)):
        runner = make_runner(path, max_model_len=max_model_len)
        prints.add(runner.info.spec.fingerprint())
        token_ids = [3 + i * i * 7 % 90 for i in range(length)]
        for sizes in ((length,), (40, 13, 1, 1, length - 55)):
            sequence = Progress(token_ids, [4, 2, 7, 1, 9, 3])
            for size in sizes:
                advance(runner, [sequence], [size])
            expected = expected_logprobs(path, token_ids)
            for position, logprobs in sequence.logprobs.items():
                torch.testing.assert_close(logprobs, expected[position], atol=2e-4, rtol=0)
    assert len(prints) == 2


def test_long_and_short_frequencies_differ(tmp_path: Path) -> None:
    """What the test above compares would differ if the other set were taken."""
    path = with_longrope("olmo2", tmp_path / "model")
    results = []
    for max_model_len in (256, 64):
        sequence = Progress(list(range(3, 53)), [4, 2, 7, 1])
        advance(make_runner(path, max_model_len=max_model_len), [sequence], [50])
        results.append(sequence.logprobs[49])
    assert (results[0] - results[1]).abs().max() > 0.1


def test_longrope_without_its_limit_is_refused(tmp_path: Path) -> None:
    path = small("olmo2", tmp_path / "model")
    given = {key: value for key, value in LONGROPE.items() if key != "type"}
    given |= {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": "many"}
    edit_config(path, rope_parameters=given)
    with pytest.raises(StartupError, match="original_max_position_embeddings"):
        make_runner(path)


def test_a_model_type_of_another_architecture_is_refused(tmp_path: Path) -> None:
    path = small("olmo2", tmp_path / "model")
    edit_config(path, model_type="cohere")
    with pytest.raises(StartupError, match=r"architecture .*Olmo2ForCausalLM.* is not supported"):
        make_runner(path)


def test_a_tensor_that_is_missing_is_named(tmp_path: Path) -> None:
    path = small("olmo2", tmp_path / "model")
    tensors = load_file(path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(StartupError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        make_runner(path)


def test_blocks_of_other_positions_have_another_name(tmp_path: Path) -> None:
    """KV of RoBERTa depends on the padding token's id."""
    path = small("roberta", tmp_path / "model")
    prints = set()
    for pad_token_id in (1, 3):
        edit_config(path, pad_token_id=pad_token_id)
        prints.add(make_runner(path).info.spec.fingerprint())
    assert len(prints) == 2


@pytest.mark.parametrize(
    ("model_type", "names"),
    [
        ("gpt_neo", ["transformer.h.0.attn.attention.bias", "transformer.h.1.attn.attention.masked_bias"]),
        ("gptj", ["transformer.h.0.attn.bias", "transformer.h.0.attn.masked_bias"]),
        ("roberta", ["roberta.embeddings.position_ids", "roberta.pooler.dense.weight", "roberta.pooler.dense.bias"]),
    ],
)
def test_what_older_releases_saved_is_left_aside(tmp_path: Path, model_type: str, names: list[str]) -> None:
    path = small(model_type, tmp_path / "model")
    needed = weight_bytes(open_model(path), 4)
    file = path / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, **{name: torch.ones(16, 16) for name in names}}, file, metadata={"format": "pt"})
    assert weight_bytes(open_model(path), 4) == needed
    make_runner(path)
    save_file({**tensors, "transformer.bias": torch.ones(2)}, file, metadata={"format": "pt"})
    with pytest.raises(StartupError, match=r"has tensor, which is not known, transformer\.bias"):
        make_runner(path)


def test_a_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    path = small("olmo2", tmp_path / "model")
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(79, 64)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(StartupError) as caught:
        make_runner(path)
    assert caught.value.message == (
        f"model {path}: tensor model.layers.1.mlp.up_proj.weight has shape [79, 64], config.json asks for [80, 64]"
    )


def test_a_file_that_is_cut_off_is_named(tmp_path: Path) -> None:
    path = small("olmo2", tmp_path / "model")
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(StartupError) as caught:
        make_runner(path)
    assert caught.value.message.startswith(f"{file} is not a readable safetensors file (")
    assert "\n" not in caught.value.message


def test_an_encoder_is_refused(tmp_path: Path) -> None:
    """Of a type that is served as a decoder."""
    path = small("bert", tmp_path / "model")
    edit_config(path, is_decoder=False)
    with pytest.raises(StartupError, match="model type bert has attention to later tokens, which is not supported"):
        make_runner(path)


def test_falcon_with_alibi_is_refused(tmp_path: Path) -> None:
    path = small("falcon", tmp_path / "model")
    edit_config(path, alibi=True)
    with pytest.raises(StartupError, match=r"model type falcon has scores that depend on distance \(alibi\)"):
        make_runner(path)


def test_layers_that_keep_a_state_are_refused(tmp_path: Path) -> None:
    """Of a type that is served if all its layers are attention."""
    path = small("granitemoehybrid", tmp_path / "model")
    edit_config(path, layer_types=["full_attention", "linear_attention"] * 2)
    with pytest.raises(StartupError, match="model type granitemoehybrid has layers of type linear_attention"):
        make_runner(path)


def test_a_pair_is_told_which_part_is_served(tmp_path: Path) -> None:
    path = small("bart", tmp_path / "model")
    edit_config(path, architectures=["BartForConditionalGeneration"])
    with pytest.raises(StartupError, match="not supported; of model type bart, BartForCausalLM is"):
        make_runner(path)


@pytest.mark.parametrize(
    ("model_type", "flags"),
    [
        ("granitemoehybrid", {"num_local_experts": 0}),  # Granite 4 without experts
        ("granitemoehybrid", {"position_embedding_type": None}),
        ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),  # Falcon 40B
        ("falcon", {"multi_query": False, "parallel_attn": False, "bias": True}),
        ("phimoe", {"sliding_window": None}),
        ("gptj", {"rotary_dim": 8}),
        ("hrm_text", {"L_cycles": 3}),
    ],
)
@pytest.mark.slow
def test_variants_of_a_type(tmp_path: Path, model_type: str, flags: dict[str, object]) -> None:
    compare(model_type, tmp_path, flags)


def test_a_name_in_other_letters(tmp_path: Path) -> None:
    path = small("phimoe", tmp_path / "model")
    edit_config(path, architectures=["PhiMoEForCausalLM"])
    assert architecture_of(open_model(path)) == "PhimoeForCausalLM"


@pytest.mark.parametrize(
    ("model_type", "keys", "expected"),
    [
        ("roberta", {"max_position_embeddings": 514, "pad_token_id": 1}, 512),
        ("whisper", {"max_target_positions": 448}, 448),
        ("olmo2", {"max_position_embeddings": 77}, 77),
    ],
)
def test_longest_sequence(tmp_path: Path, model_type: str, keys: dict[str, int], expected: int) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": model_type, "architectures": [names()[model_type]], **keys})
    )
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model.safetensors").write_text("")
    assert max_positions(open_model(tmp_path)) == expected


def greedy(path: Path, prompt: list[int], num_tokens: int) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(num_tokens):
            tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("kernels", best_and_slow_others)
@pytest.mark.parametrize(
    "model_type",
    [
        "cohere2",
        "gpt_oss",
        pytest.param("olmo2", marks=pytest.mark.slow),
        pytest.param("deepseek_v3", marks=pytest.mark.slow),
    ],
)
def test_preempted_and_from_the_prefix_cache(tmp_path: Path, model_type: str, kernels: str) -> None:
    path = small(model_type, tmp_path / "model")
    values = {"dtype": "float32", "num_blocks": 9, "max_model_len": 128, "chunk_size": 24, "num_threads": 1}
    settings = EngineSettings.model_validate({**values, "kernels": kernels})
    runner = LocalDevice(path, settings)
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


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_layers_that_are_given_the_same_tensor_are_one_product(tmp_path: Path, kernels: str) -> None:
    """On the kernels."""
    if not VARIANTS and kernels == "auto":
        pytest.skip("no kernels were built")
    model = make_runner(small("olmo2", tmp_path / "model"), kernels=kernels)._model
    assert isinstance(model, TransformersModel)
    products: dict[int, list[str]] = {}
    for name, module in model._base.named_modules():
        if isinstance(module, OwnLinear) and name.startswith("layers.1."):
            products.setdefault(id(module._product), []).append(name.rpartition(".")[2])
    groups = [["down_proj"], ["gate_proj", "up_proj"], ["o_proj"], ["q_proj", "k_proj", "v_proj"]]
    if kernels == "torch":
        groups = sorted([name] for group in groups for name in group)
    assert sorted(products.values()) == groups


def test_parts_of_a_product_are_those_of_what_each_was_given() -> None:
    torch.manual_seed(2)
    modules = [nn.Linear(16, 24, bias=False), nn.Linear(16, 8), nn.Linear(16, 32)]
    first, second, third = own_linears(deepcopy(modules), None)
    x, y = torch.randn(1, 5, 16), torch.randn(3, 16)
    for own, module, given in zip(
        (first, second, first, third, second, second), (0, 1, 0, 2, 1, 1), (x, y, x, x, x, y), strict=True
    ):
        torch.testing.assert_close(own(given), modules[module](given), atol=1e-5, rtol=1e-5)


def test_parts_of_a_product_for_no_rows() -> None:
    modules = [nn.Linear(16, 24), nn.Linear(16, 8)]
    for own, module in zip(own_linears(deepcopy(modules), None), modules, strict=True):
        assert own(torch.empty(1, 0, 16)).shape == module(torch.empty(1, 0, 16)).shape


def test_a_tensor_that_is_written_to_between_two_layers_is_not_the_same_for_both() -> None:
    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q = self.q(x)
            x.mul_(0.5)
            added: torch.Tensor = q + self.k(x) + self.v(x)
            return added

    parent, calls = Parent(), Calls()
    hook = register_module_forward_pre_hook(calls.note)
    try:
        with torch.inference_mode():
            parent(torch.randn(2, 16))
    finally:
        hook.remove()
    assert calls.linears_of(parent) == [["q"], ["k", "v"]]


@pytest.mark.parametrize(("model_type", "looks_up"), [("gpt2", True), ("gemma", False)])
def test_a_tied_weight_is_kept_once(tmp_path: Path, model_type: str, looks_up: bool) -> None:
    """But for embeddings that scale what they look up, as Gemma's."""
    if not VARIANTS:
        pytest.skip("no kernels were built")
    model = make_runner(small(model_type, tmp_path / "model"))._model
    assert isinstance(model, TransformersModel)
    embedding = model._base.wte if looks_up else model._base.embed_tokens
    assert isinstance(embedding, OwnEmbedding) == looks_up == isinstance(model._top.lm_head, OwnLinear)


@pytest.mark.parametrize(
    ("model_type", "left"),
    [
        ("gpt2", "Embedding: "),  # Conv1D and a tied head
        ("granitemoe", "Embedding: 6144, GraniteMoeTopKRouter: 1024"),  # experts
        # Experts of a form of their own.
        ("longcat_flash", "Embedding: 6144, LatentAttention: 24576, Linear: 1536, LongcatFlashExperts: "),
    ],
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
