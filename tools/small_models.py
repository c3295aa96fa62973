"""Small random models of the types that transformers has."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCAB_SIZE = 96
MAX_PARAMETERS = 30_000_000

# By all the names that configs have for them. Windows are shorter than what is computed.
SIZES: dict[str, object] = {
    **dict.fromkeys(("vocab_size", "text_vocab_size"), VOCAB_SIZE),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads"), 4),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "shared_expert_intermediate_size"), 80
    ),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 256),
    **dict.fromkeys(
        ("moe_intermediate_size", "expert_intermediate_size", "expert_ffn_hidden_size", "intermediate_size_mlp"), 48
    ),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "num_experts_per_token", "moe_topk"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "num_shared_experts"), 1),
    **dict.fromkeys(("pad_token_id",), 0),
    **dict.fromkeys(("bos_token_id",), 1),
    **dict.fromkeys(("eos_token_id",), 2),
    **dict.fromkeys(("decoder_layers", "encoder_layers"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim"), 80),
    "max_target_positions": 256,
    "is_decoder": True,  # of what is an encoder otherwise
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "word_embed_proj_dim": 64,
    "rotary_dim": 16,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_rope_head_dim": 16,  # as head_dim: some configs take the one for the other
    "qk_nope_head_dim": 12,
    "v_head_dim": 20,
    "sliding_window": 20,
    "first_k_dense_replace": 1,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "num_kv_shared_layers": 2,
    "zero_expert_num": 2,
    "default_language": "en_XX",
}


# What is tried in turn if a type does not take these sizes.
VARIATIONS: tuple[dict[str, object], ...] = (
    {},
    {"num_key_value_heads": 4},
    {"num_key_value_heads": None, "head_dim": None, "pad_token_id": None},
    # Whose lists of layers are as long as they are by default, and what else single types ask for.
    {"num_hidden_layers": None, "num_experts_per_tok": 1, "num_heads": 8},
    {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in ("full_attention", "sliding_attention")
        },
    },
)


# Of types that are served in some variants only, or have names of their own.
SIZES_OF_TYPE: dict[str, dict[str, object]] = {
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 20},
    "granitemoehybrid": {"layer_types": ["full_attention"] * 4, "position_embedding_type": "rope"},
}


class UnbuildableError(Exception):
    """No small model of a type can be had; the message says why."""


def small_config(model_type: str, variation: Mapping[str, object]) -> PreTrainedConfig:
    """A config with what the type knows of `SIZES` and `variation`; None is the type's default. Raises
    `UnbuildableError`."""
    wanted = {**SIZES, **SIZES_OF_TYPE.get(model_type, {}), **variation}
    config_class = CONFIG_MAPPING[model_type]
    try:
        known = config_class().to_dict().keys() | set(config_class.attribute_map)
    except Exception as error:
        raise UnbuildableError(one_line(error)) from error
    # Names that one value answers to are given once.
    sizes = {
        name: size
        for name, size in wanted.items()
        if name in known and name not in config_class.attribute_map and size is not None
    }
    try:
        return config_class(**sizes)
    except Exception as error:
        raise UnbuildableError(one_line(error)) from error


def build(config: PreTrainedConfig) -> torch.nn.Module:
    """A model with random weights, large enough that each matters. Raises `UnbuildableError`."""
    try:
        with torch.device("meta"):
            size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    except Exception as error:
        raise UnbuildableError(one_line(error)) from error
    if size > MAX_PARAMETERS:
        raise UnbuildableError(f"the smallest one that was built has {size} parameters")
    torch.manual_seed(3)
    model: torch.nn.Module = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn_like(parameter) * 0.2)
            elif "norm" in name or name.endswith(("bias", "sinks")):
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def save(model: torch.nn.Module, folder: Path) -> None:
    """Saves the model with a tokenizer that knows nothing. Raises `UnbuildableError`."""
    try:
        model.save_pretrained(folder)  # type: ignore[operator]
    except Exception as error:
        raise UnbuildableError(f"transformers cannot save it: {one_line(error)}") from error
    (folder / "tokenizer.json").write_text("{}")


def one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:120]
