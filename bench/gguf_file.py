"""A Llama of a Hugging Face directory as a GGUF file of bfloat16 or float32, for llama.cpp.

Its vocabulary has the right size, and words that nobody reads: what is measured begins and ends with token ids.
"""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import torch
from safetensors.torch import load_file

_NAMES = {  # those of a layer without its number
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_ROTATED = ("attn_q", "attn_k")  # llama.cpp pairs neighbours, Hugging Face the halves of a head


def write_gguf(model_dir: Path, dtype: str, target: Path) -> None:
    """Norms are float32 either way. Raises `KeyError` for a tensor that a Llama does not have."""
    config = json.loads((model_dir / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(target, "llama")
    _add_vocabulary(writer, config["vocab_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_dimension_count(config.get("head_dim") or config["hidden_size"] // heads)
    writer.add_rope_freq_base((config.get("rope_parameters") or config)["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    for file in sorted(model_dir.glob("*.safetensors")):
        for hf_name, tensor in load_file(file).items():
            stem, _, kind = hf_name.rpartition(".")
            parts = stem.split(".")
            prefix = ""
            if parts[:2] == ["model", "layers"]:
                prefix, stem = f"blk.{parts[2]}.", ".".join(parts[3:])
            name = _NAMES[stem]
            if name == "output" and config["tie_word_embeddings"]:
                continue
            if name in _ROTATED:
                pairs = (heads if name == "attn_q" else kv_heads, 2, -1, tensor.shape[1])
                tensor = tensor.view(pairs).transpose(1, 2).reshape(tensor.shape)
            _add(writer, f"{prefix}{name}.{kind}", tensor, dtype if tensor.dim() == 2 else "float32")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    kinds = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL] + [gguf.TokenType.BYTE] * 256
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += [f"word{number}" for number in range(len(words), size)]
    kinds += [gguf.TokenType.NORMAL] * (size - len(kinds))
    writer.add_vocab_size(size)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(words)
    writer.add_token_scores([0.0] * size)
    writer.add_token_types(kinds)
    writer.add_eos_token_id(size - 1)  # one that no answer is likely to hold


def _add(writer: gguf.GGUFWriter, name: str, tensor: torch.Tensor, dtype: str) -> None:
    if dtype == "float32":
        writer.add_tensor(name, tensor.float().contiguous().numpy())
        return
    data = tensor.bfloat16().contiguous().view(torch.uint8).numpy()
    writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType.BF16)
