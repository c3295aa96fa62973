"""Experts on transformers' code: which become Baton's, and that they compute the same."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.models.aria.modeling_aria import AriaExperts, AriaTextConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextConfig, Gemma4TextExperts
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssConfig, GptOssExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHConfig, NemotronHExperts
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeConfig, Qwen2MoeExperts

from engine.kernels.library import WeightKind
from engine.models.own_experts import OwnExperts, experts_of, is_experts, own_experts
from engine.models.transformers_model import TransformersModel
from engine.models.verified import VERIFIED
from tests.engine.kernels.variants import VARIANTS, each_variant, kernels
from tests.engine.tiny_models import make_runner
from tools.small_models import VARIATIONS, build, save, small_config
from tools.verified_models import compare

needs_kernels = pytest.mark.skipif(not VARIANTS, reason="no kernels were built")

GEMMA: Mapping[str, object] = {
    **VARIATIONS[3],
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 0,
}
# How many layers of a type's small model have experts: some types begin with layers of one MLP.
NUM_LAYERS = {
    **dict.fromkeys(("aria_text", "cohere2_moe", "flex_olmo", "gpt_oss", "granitemoe", "granitemoe_swa"), 4),
    **dict.fromkeys(("granitemoehybrid", "granitemoeshared", "hunyuan_v1_moe", "kolibri1", "mellum", "minimax_m2"), 4),
    **dict.fromkeys(("olmoe", "phimoe", "qwen2_moe", "solar_open"), 4),
    **dict.fromkeys(("afmoe", "axk1", "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5_moe", "exaone_moe"), 3),
    **dict.fromkeys(("glm4_moe", "glm4_moe_lite", "hy_v3", "laguna", "mimo_v2_flash"), 3),
    "flint": 2,
    "beam": 1,
    "gemma4_text": 6,
}
# With a gate of their own, which the kernels do not know: an expert is two products.
OWN_GATE = {"beam", "gpt_oss"}
QUICK = {"qwen2_moe", "gpt_oss"}


def has_interface(model_type: str) -> bool:
    code = inspect.getmodule(MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[model_type]])
    return code is not None and "@use_experts_implementation" in inspect.getsource(code)


def test_no_type_with_such_experts_is_left_out() -> None:
    assert {model_type for model_type in VERIFIED if has_interface(model_type)} == NUM_LAYERS.keys()


def model_of(model_type: str, path: Path, **settings: Any) -> TransformersModel:
    save(build(small_config(model_type, GEMMA if model_type == "gemma4_text" else VARIATIONS[0])), path)
    model = make_runner(path, **settings)._model
    assert isinstance(model, TransformersModel)
    return model


@needs_kernels
@pytest.mark.parametrize(
    "model_type", [each if each in QUICK else pytest.param(each, marks=pytest.mark.slow) for each in NUM_LAYERS]
)
def test_how_many_become_batons(tmp_path: Path, model_type: str) -> None:
    model = model_of(model_type, tmp_path / "model")
    own = [module for module in model._base.modules() if isinstance(module, OwnExperts)]
    assert len(own) == NUM_LAYERS[model_type]
    assert {each.mlps.is_one_call for each in own} == {model_type not in OWN_GATE}
    assert experts_of(model._base) == []
    assert not [name for name, _ in model._base.named_parameters() if "gate_up_proj" in name]


def test_without_kernels_they_stay(tmp_path: Path) -> None:
    model = model_of("qwen2_moe", tmp_path / "model", kernels="torch")
    assert len(experts_of(model._base)) == NUM_LAYERS["qwen2_moe"]


@needs_kernels
@pytest.mark.parametrize("model_type", ["olmoe", "gpt_oss"])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantised_experts(tmp_path: Path, model_type: str, quantization: str) -> None:
    """Those of each kind take the memory of their codes, and give nearly the same."""
    exact, quantised = (
        list(model_of(model_type, tmp_path / kind, quantization=kind)._base.modules())
        for kind in ("none", quantization)
    )
    pairs = [(a, b) for a, b in zip(exact, quantised, strict=True) if isinstance(a, OwnExperts)]
    assert len(pairs) == NUM_LAYERS[model_type]
    kind = WeightKind.INT8 if quantization == "int8" else WeightKind.INT4
    x, chosen = torch.randn(9, HIDDEN), torch.rand(9, 4).topk(2).indices
    shares = torch.full((9, 2), 0.5)
    for one, other in pairs:
        assert isinstance(other, OwnExperts)
        assert {each.packed.struct.kind for each in (*other.mlps.gate_ups, *other.mlps.downs) if each.packed} == {kind}
        expected, given = one(x, chosen, shares), other(x, chosen, shares)
        error = (given - expected).norm() / expected.norm()
        assert 1e-4 < error < (0.05 if kind is WeightKind.INT8 else 0.3)


def test_gemma_with_experts_is_equal(tmp_path: Path) -> None:
    """Whose gates pass GELU. The survey compares it without experts."""
    compare("gemma4_text", tmp_path, GEMMA)


HIDDEN, NUM_EXPERTS, PER_TOKEN = 64, 6, 3


def modules() -> dict[str, nn.Module]:
    """One of each form."""
    sizes = {"hidden_size": HIDDEN, "moe_intermediate_size": 40, "intermediate_size": 40}
    made = {
        "plain": Qwen2MoeExperts(Qwen2MoeConfig(num_experts=NUM_EXPERTS, **sizes)),
        "gelu": Gemma4TextExperts(Gemma4TextConfig(num_experts=NUM_EXPERTS, **sizes)),
        "transposed": AriaExperts(AriaTextConfig(moe_num_experts=NUM_EXPERTS, **sizes)),
        "clamped": GptOssExperts(GptOssConfig(num_local_experts=NUM_EXPERTS, swiglu_limit=1.5, **sizes)),
    }
    generator = torch.Generator().manual_seed(3)
    for module in made.values():
        module.config._experts_implementation = "eager"
        for parameter in module.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3
    return made


@each_variant
@pytest.mark.parametrize("form", ["plain", "gelu", "transposed", "clamped"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@torch.inference_mode()
def test_each_form_is_equal(variant: str, form: str, dtype: torch.dtype, tolerance: float) -> None:
    """An expert that nobody chose, one whom all did, and shares that do not add up to 1."""
    module = modules()[form]
    generator = torch.Generator().manual_seed(5)
    calls = []
    for num_tokens in (1, 7, 40):
        x = torch.randn(num_tokens, HIDDEN, generator=generator)
        choice = torch.rand(num_tokens, NUM_EXPERTS, generator=generator)
        choice[:, 2], choice[:, 4] = 0, 2
        shares, chosen = choice.topk(PER_TOKEN)
        calls.append((x, chosen, shares, module(x, chosen, shares)))
    assert is_experts(module)
    own = own_experts(module.to(dtype), kernels(variant))
    assert not is_experts(module)
    for x, chosen, shares, expected in calls:
        given = own(x.to(dtype), chosen, shares)
        assert given.dtype == dtype
        assert (given.float() - expected).norm() <= tolerance * expected.norm()


def test_other_forms_stay() -> None:
    without_gates = NemotronHExperts(NemotronHConfig())
    assert not without_gates.has_gate
    assert not is_experts(without_gates)
    normed = modules()["plain"]
    setattr(normed, "has_post_expert_norm", True)  # noqa: B010 (a module has no such attribute, says its type)
    assert not is_experts(normed)
    assert not is_experts(nn.Linear(4, 4))
