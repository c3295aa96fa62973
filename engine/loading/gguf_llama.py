"""A Llama in a GGUF file, as the config.json and tensors of a Hugging Face directory."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

from common.errors import StartupError

_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def read_gguf_llama(file: Path, dtype: str) -> tuple[dict[str, object], dict[str, npt.NDArray[np.float32]]]:
    """The config, which names `dtype`, and the dequantised float32 tensors, by their Hugging Face names."""
    reader = gguf.GGUFReader(file)
    fields = {name: field.contents() for name, field in reader.fields.items() if not _is_long(name)}
    if fields.get("general.architecture") != "llama":
        raise StartupError(f"{file} holds architecture {fields.get('general.architecture')!r}, not llama")
    num_heads, num_kv_heads = fields["llama.attention.head_count"], fields["llama.attention.head_count_kv"]
    tensors: dict[str, npt.NDArray[np.float32]] = {}
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        if ".attn_q." in tensor.name:
            values = _halves_apart(values, num_heads)
        elif ".attn_k." in tensor.name:
            values = _halves_apart(values, num_kv_heads)
        tensors[_hugging_face_name(tensor.name)] = np.ascontiguousarray(values)
    config: dict[str, object] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "vocab_size": fields["llama.vocab_size"],
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": fields["llama.rope.dimension_count"],
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": fields["llama.attention.layer_norm_rms_epsilon"],
        "rope_parameters": {"rope_type": "default", "rope_theta": fields["llama.rope.freq_base"]},
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "dtype": dtype,
    }
    return config, tensors


def _is_long(field: str) -> bool:
    """Whether a field lists the vocabulary, which takes seconds to unpack."""
    return field in ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type", "tokenizer.ggml.merges")


def _halves_apart(weight: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """Rows of Q or K in the order of Hugging Face: GGUF pairs neighbours for rotary embedding, it pairs halves."""
    paired = weight.reshape(num_heads, -1, 2, weight.shape[1])  # [heads, head_dim / 2, 2, hidden]
    return paired.swapaxes(1, 2).reshape(weight.shape)


def _hugging_face_name(name: str) -> str:
    stem, _, suffix = name.rpartition(".")
    if stem in _TENSORS:
        return f"{_TENSORS[stem]}.{suffix}"
    _, index, part = stem.split(".")
    return f"model.layers.{index}.{_LAYER_TENSORS[part]}.{suffix}"
