"""Architectures that Baton computes itself: how each one's config.json becomes flags of one decoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from common.errors import StartupError
from engine.kernels.library import Activation
from engine.loading.checkpoints.hf_quantized import QUANTIZATION_KEYS, scheme_of
from engine.models.description import DecoderConfig, ExpertsConfig, Rope
from engine.models.hf_config import HFConfig, read_hf_config
from engine.models.rope import read_rope

_ACTIVATIONS = {"silu": Activation.SILU, "gelu_pytorch_tanh": Activation.GELU_TANH}
FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(slots=True, frozen=True, kw_only=True)
class Family:
    model_type: str  # transformers' name of the config's class
    flags: Callable[[HFConfig], dict[str, object]]  # fields of `DecoderConfig` that differ from the plain ones
    honours: frozenset[str] = frozenset()  # flags of config.json that `flags` and `describe` read


def _llama(config: HFConfig) -> dict[str, object]:
    bias = config.values.boolean("attention_bias", False)
    return {"qkv_bias": bias, "out_bias": bias, "mlp_bias": config.values.boolean("mlp_bias", False)}


def _mistral(config: HFConfig) -> dict[str, object]:  # noqa: ARG001
    return {}


def _qwen2(config: HFConfig) -> dict[str, object]:  # noqa: ARG001
    return {"qkv_bias": True}


def _qwen3(config: HFConfig) -> dict[str, object]:
    bias = config.values.boolean("attention_bias", False)
    return {"qkv_bias": bias, "out_bias": bias, "qk_norm": True}


def _phi3(config: HFConfig) -> dict[str, object]:  # noqa: ARG001
    return {"merged_names": True}


def _mixtral(config: HFConfig) -> dict[str, object]:
    values = config.values
    experts = ExpertsConfig(
        num_experts=values.integer("num_local_experts"),
        per_token=values.integer("num_experts_per_tok"),
        inner_size=values.integer("intermediate_size"),
        normalises=True,
        layers=(True,) * values.integer("num_hidden_layers"),
        block="block_sparse_moe",
        gate_up_down=("w1", "w3", "w2"),
    )
    return {"experts": experts}


def _qwen3_moe(config: HFConfig) -> dict[str, object]:
    values, plain = config.values, config.flag("mlp_only_layers") or ()
    if not isinstance(plain, list | tuple) or not all(isinstance(layer, int) for layer in plain):
        raise StartupError(f"config.json: mlp_only_layers has to be a list of integers, not {plain!r}")
    step = values.integer("decoder_sparse_step", 1)
    num_layers = values.integer("num_hidden_layers")
    experts = ExpertsConfig(
        num_experts=values.integer("num_experts"),
        per_token=values.integer("num_experts_per_tok"),
        inner_size=values.integer("moe_intermediate_size"),
        normalises=values.boolean("norm_topk_prob", False),
        layers=tuple(layer not in plain and (layer + 1) % step == 0 for layer in range(num_layers)),
        block="mlp",
        gate_up_down=("gate_proj", "up_proj", "down_proj"),
    )
    return {**_qwen3(config), "experts": experts}


def _gemma2(config: HFConfig) -> dict[str, object]:
    values = config.values
    bias = values.boolean("attention_bias", False)
    return {
        "qkv_bias": bias,
        "out_bias": bias,
        "sandwich_norms": True,
        "norms_from_one": True,
        "embedding_scale": values.integer("hidden_size") ** 0.5,
        "softmax_scale": values.number("query_pre_attn_scalar") ** -0.5,
        "soft_cap": values.number("attn_logit_softcapping", 0.0),
        "logit_soft_cap": values.number("final_logit_softcapping", 0.0),
    }


def _gemma3(config: HFConfig) -> dict[str, object]:
    # Its attention does not use attn_logit_softcapping, although its class knows it.
    if config.flag("attn_logit_softcapping"):
        raise StartupError("config.json: attn_logit_softcapping is not supported by this architecture")
    return {**_gemma2(config), "soft_cap": 0.0, "qk_norm": True}


_LAYERED_WINDOWS = frozenset({"layer_types", "sliding_window"})
_QWEN_WINDOWS = _LAYERED_WINDOWS | {"use_sliding_window", "max_window_layers"}
_GEMMA = (
    frozenset({"hidden_activation", "attention_bias", "query_pre_attn_scalar"})
    | {"attn_logit_softcapping", "final_logit_softcapping"}
    | _LAYERED_WINDOWS
)
_QWEN_EXPERTS = frozenset(
    {"moe_intermediate_size", "num_experts_per_tok", "num_experts", "num_local_experts", "norm_topk_prob"}
    | {"mlp_only_layers", "decoder_sparse_step"}
)

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(model_type="llama", flags=_llama, honours=frozenset({"attention_bias", "mlp_bias"})),
    "MistralForCausalLM": Family(model_type="mistral", flags=_mistral, honours=frozenset({"sliding_window"})),
    "Qwen2ForCausalLM": Family(model_type="qwen2", flags=_qwen2, honours=_QWEN_WINDOWS),
    "Qwen3ForCausalLM": Family(model_type="qwen3", flags=_qwen3, honours=_QWEN_WINDOWS | {"attention_bias"}),
    "Gemma2ForCausalLM": Family(model_type="gemma2", flags=_gemma2, honours=_GEMMA),
    "Gemma3ForCausalLM": Family(model_type="gemma3_text", flags=_gemma3, honours=_GEMMA | {"sliding_window_pattern"}),
    "Phi3ForCausalLM": Family(model_type="phi3", flags=_phi3, honours=frozenset({"sliding_window"})),
    "MixtralForCausalLM": Family(
        model_type="mixtral",
        flags=_mixtral,
        honours=frozenset({"sliding_window", "num_local_experts", "num_experts_per_tok"}),
    ),
    "Qwen3MoeForCausalLM": Family(
        model_type="qwen3_moe",
        flags=_qwen3_moe,
        honours=_QWEN_EXPERTS | {"sliding_window", "use_sliding_window", "attention_bias"},
    ),
}


def read_family_config(architecture: str, config: Mapping[str, object]) -> HFConfig:
    family = FAMILIES[architecture]
    scheme_of(config)  # may refuse it
    config = {key: value for key, value in config.items() if key not in QUANTIZATION_KEYS}
    elsewhere = frozenset[str]().union(*(each.honours for each in FAMILIES.values()))
    return read_hf_config(config, family.model_type, family.honours, elsewhere - {"num_local_experts", "num_experts"})


def describe(architecture: str, config: HFConfig, num_positions: int) -> DecoderConfig:
    """The flags of a model whose sequences have up to `num_positions` tokens. Raises `StartupError` that names a key of
    config.json."""
    values = config.values
    num_heads, hidden_size = values.integer("num_attention_heads"), values.integer("hidden_size")
    num_kv_heads = values.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise StartupError("config.json: num_attention_heads has to be a multiple of num_key_value_heads")
    head_dim = values.integer("head_dim", hidden_size // num_heads)
    num_layers = values.integer("num_hidden_layers")
    layer_types = _layer_types(config, num_layers)
    ropes, rope_of_layer = _ropes(architecture, config, layer_types, head_dim, num_positions)
    flags: dict[str, object] = {"softmax_scale": head_dim**-0.5, **FAMILIES[architecture].flags(config)}
    return DecoderConfig(
        vocab_size=values.integer("vocab_size"),
        hidden_size=hidden_size,
        inner_size=values.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        eps=values.number("rms_norm_eps", 1e-6),
        activation=_activation(config),
        tie_word_embeddings=values.boolean("tie_word_embeddings", False),
        windows=_windows(config, layer_types, num_positions),
        ropes=ropes,
        rope_of_layer=rope_of_layer,
        **flags,  # type: ignore[arg-type]
    )


def _activation(config: HFConfig) -> Activation:
    key = "hidden_act" if config.flag("hidden_activation") is None else "hidden_activation"
    name = config.values.text(key, "silu")
    if name not in _ACTIVATIONS:
        raise StartupError(f"config.json: {key} {name!r} is not supported; known are {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _layer_types(config: HFConfig, num_layers: int) -> tuple[str, ...]:
    """The types of all layers; without `layer_types` all slide if there is a window."""
    types = config.flag("layer_types")
    if types is None:
        return (SLIDING if config.flag("sliding_window") else FULL,) * num_layers
    if not isinstance(types, list | tuple) or len(types) != num_layers or not set(types) <= {FULL, SLIDING}:
        raise StartupError(
            f"config.json: layer_types has to name {FULL} or {SLIDING} for each of {num_layers} layers, not {types!r}"
        )
    return tuple(types)


def _windows(config: HFConfig, layer_types: tuple[str, ...], num_positions: int) -> tuple[int, ...]:
    if SLIDING not in layer_types:
        return (0,) * len(layer_types)
    window = config.values.integer("sliding_window")
    # A window of all positions hides nothing.
    return tuple(window if each == SLIDING and window < num_positions else 0 for each in layer_types)


def _ropes(
    architecture: str, config: HFConfig, layer_types: tuple[str, ...], head_dim: int, num_positions: int
) -> tuple[tuple[Rope, ...], tuple[int, ...]]:
    may_be_partial = architecture == "Phi3ForCausalLM"
    parameters = config.flag("rope_parameters")
    names = [name for name in (FULL, SLIDING) if isinstance(parameters, dict) and name in parameters]
    if not names:
        rope = read_rope(config, head_dim, num_positions, may_be_partial=may_be_partial)
        return (rope,), (0,) * len(layer_types)
    if missing := set(layer_types) - set(names):
        raise StartupError(f"config.json: rope_parameters lacks {', '.join(sorted(missing))}")
    used = [name for name in names if name in layer_types]
    ropes = tuple(
        read_rope(config, head_dim, num_positions, layer_type=name, may_be_partial=may_be_partial) for name in used
    )
    return ropes, tuple(used.index(name) for name in layer_types)
