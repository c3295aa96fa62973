"""Small GGUF files written by gguf's own writer, and the same models, dequantised, for transformers."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import gguf
import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tests.engine.tiny_models import VOCAB_SIZE, make_model

Type: TypeAlias = gguf.GGMLQuantizationType
Floats = npt.NDArray[np.float32]

# Quantised by gguf; the others get random codes, since gguf reads but does not write them.
WRITTEN = (Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0)
SIZES: dict[str, object] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "head_dim": 64,
    "num_hidden_layers": 3,
    "initializer_range": 0.1,
}
MODELS: dict[str, dict[str, object]] = {
    "llama": {"model_type": "llama", "tie_word_embeddings": False},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "tie_word_embeddings": True},
    "gemma3": {
        "model_type": "gemma3_text",
        "sliding_window": 18,
        "query_pre_attn_scalar": 64,
        "tie_word_embeddings": True,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 8.0},
        },
    },
}
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GEMMA_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


@dataclass
class Written:
    file: Path
    reference: Path  # the model as transformers has it, with what the file's tensors mean
    types: dict[str, Type] = field(default_factory=dict)  # by the file's names


def quantized(values: Floats, kind: Type, seed: int) -> npt.NDArray[np.uint8]:
    """Bytes of a matrix; random ones, of about the same size, if gguf cannot quantise to `kind`."""
    if kind in WRITTEN:
        packed: npt.NDArray[np.uint8] = gguf.quantize(values, kind)
        return packed
    block, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(seed).integers(
        0, 256, (*values.shape[:-1], values.shape[-1] // block * num_bytes), np.uint8
    )
    blocks = raw.reshape(-1, num_bytes)
    for at in _HALVES[kind]:
        scale = np.random.default_rng(seed + 1).uniform(0.5, 1.5, len(blocks)) * _SIZE[kind]
        blocks[:, at : at + 2] = scale.astype(np.float16)[:, None].view(np.uint8)
    return raw


# Where a block has float16 factors, and how large they are for weights of about 0.1.
_HALVES = {Type.Q4_K: (0, 2), Type.Q5_K: (0, 2), Type.Q6_K: (208,), Type.Q2_K: (80, 82), Type.Q3_K: (108,)}
_SIZE = {Type.Q4_K: 1e-3, Type.Q5_K: 5e-4, Type.Q6_K: 5e-5, Type.Q2_K: 1e-2, Type.Q3_K: 3e-3}


def _pairs(values: Floats, num_heads: int) -> Floats:
    """Rows as llama.cpp's converter lays them: halves of a head become neighbours."""
    return values.reshape(num_heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def _halves(values: Floats, num_heads: int) -> Floats:
    return values.reshape(num_heads, -1, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def write_gguf(
    folder: Path, architecture: str, kinds: tuple[Type, ...], *, leave_out: str = "", part_tensors: int = 0
) -> Written:
    """A model of `architecture`, its matrices quantised as `kinds` in turn; the embedding as the first. With
    `part_tensors`, in parts that have so many tensors each, of which `file` is the first."""
    reference = make_model(folder / architecture, {**SIZES, **MODELS[architecture]})
    tensors = load_file(reference / "model.safetensors")
    written = Written(folder / f"{architecture}.gguf", reference)
    writer = gguf.GGUFWriter(written.file, architecture, split_max_tensors=part_tensors)
    _write_metadata(writer, architecture)
    heads = {"self_attn.q_proj": 4, "self_attn.k_proj": 2} if architecture == "llama" else {}
    names = _NAMES | (_GEMMA_NAMES if architecture == "gemma3" else {})
    for number, name in enumerate(sorted(tensors)):
        stem, _, suffix = name.rpartition(".")
        layer = stem.split(".")[2] if stem.startswith("model.layers.") else None
        part = stem if layer is None else stem.split(".", 3)[3]
        new = f"{names[part]}.{suffix}" if layer is None else f"blk.{layer}.{names[part]}.{suffix}"
        values = tensors[name].float().numpy()
        if part in heads:
            values = _pairs(values, heads[part])
        if new == leave_out:
            continue
        if values.ndim == 1:
            writer.add_tensor(new, values + 1 if architecture == "gemma3" and "norm" in new else values)
            continue
        kind = kinds[number % len(kinds)] if layer is not None else kinds[0]
        if kind == Type.F32:
            writer.add_tensor(new, values)
        else:
            data = quantized(values, kind, number)
            writer.add_tensor(new, data, raw_dtype=kind)
            values = gguf.dequantize(data, kind).astype(np.float32)
        written.types[new] = kind
        meant = _halves(values, heads[part]) if part in heads else values
        tensors[name] = torch.from_numpy(np.ascontiguousarray(meant))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if part_tensors:
        written.file = min(folder.glob(f"{architecture}-00001-of-*.gguf"))
    save_file(tensors, reference / "model.safetensors", metadata={"format": "pt"})
    return written


def _write_metadata(writer: gguf.GGUFWriter, architecture: str) -> None:
    writer.add_context_length(256)
    writer.add_embedding_length(256)
    writer.add_block_count(3)
    writer.add_feed_forward_length(512)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_key_length(64)
    writer.add_value_length(64)
    if architecture == "gemma3":
        writer.add_sliding_window(18)
        writer.add_sliding_window_pattern(2)
        writer.add_rope_freq_base(5000.0)
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(8.0)
    tokens = [*list(bytes_to_unicode().values())[: VOCAB_SIZE - 4], "ab", "<|start|>", "<|im_end|>", "<|text_end|>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * (VOCAB_SIZE - 3) + [3] * 3)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(VOCAB_SIZE - 3)
    writer.add_eos_token_id(VOCAB_SIZE - 1)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")
