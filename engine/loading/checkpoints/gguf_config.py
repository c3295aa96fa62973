"""A GGUF file's metadata as the config.json of transformers, and its tensors by the names that they have there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from common.errors import StartupError
from engine.loading.checkpoints.gguf_file import GgufFile

_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_LAYER_TENSORS = _LAYER_TENSORS | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
ROPE_FACTORS = "rope_freqs.weight"

# Tokens that end an answer, which files name as tokens alone.
_ENDS_OF_TURN = ("<|eot_id|>", "<|im_end|>", "<end_of_turn>")
_CONTROL_TYPES = (3, 4)

_GEMMA_27B_LAYERS = 62  # the one size whose scores are not divided by the root of head_dim
_GEMMA_LOCAL_THETA = 10000.0


@dataclass(slots=True, frozen=True)
class _Architecture:
    causal_lm: str
    model_type: str
    layer_tensors: dict[str, str]
    flags: Callable[[_Metadata], dict[str, object]]
    pairs_neighbours: bool = False  # rotary embedding turns neighbours of Q and K, not halves
    norms_plus_one: bool = False  # norms are stored as what is multiplied by, not as the difference from 1


class _Metadata:
    """Typed access; a value that is missing or wrong is a `StartupError` that names its key."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file

    def number(self, key: str, default: float | None = None) -> float:
        value = self.file.metadata.get(f"{self.file.architecture}.{key}", default)
        if isinstance(value, list) and len(set(value)) == 1:  # one for each layer
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(key, "a number", value)
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.number(key, default)
        if not isinstance(value, int) or value <= 0:
            raise self._wrong(key, "a positive integer", value)
        return value

    def has(self, key: str) -> bool:
        return f"{self.file.architecture}.{key}" in self.file.metadata

    def _wrong(self, key: str, wanted: str, value: object) -> StartupError:
        return StartupError(f"{self.file.path}: {self.file.architecture}.{key} has to be {wanted}, not {value!r}")


def _llama(metadata: _Metadata) -> dict[str, object]:
    bias = "blk.0.attn_q.bias" in metadata.file.tensors
    return {"attention_bias": bias, "mlp_bias": False, "rope_parameters": _rope(metadata)}


def _qwen(metadata: _Metadata) -> dict[str, object]:
    return {"rope_parameters": _rope(metadata), "use_sliding_window": False}


def _gemma3(metadata: _Metadata) -> dict[str, object]:
    num_layers, head_dim = metadata.integer("block_count"), _head_dim(metadata)
    pattern = metadata.integer("attention.sliding_window_pattern", 6)
    local = {
        "rope_type": "default",
        "rope_theta": float(metadata.number("rope.freq_base_swa", _GEMMA_LOCAL_THETA)),
    }
    scalar = head_dim
    if num_layers == _GEMMA_27B_LAYERS:
        scalar = metadata.integer("embedding_length") // metadata.integer("attention.head_count")
    cap = metadata.number("final_logit_softcapping", 0.0)
    return {
        "layer_types": [
            "full_attention" if (layer + 1) % pattern == 0 else "sliding_attention" for layer in range(num_layers)
        ],
        "sliding_window": metadata.integer("attention.sliding_window"),
        "query_pre_attn_scalar": scalar,
        "final_logit_softcapping": cap or None,
        "attn_logit_softcapping": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_parameters": {"full_attention": _rope(metadata, default_theta=1e6), "sliding_attention": local},
    }


ARCHITECTURES: dict[str, _Architecture] = {
    "llama": _Architecture("LlamaForCausalLM", "llama", _LAYER_TENSORS, _llama, pairs_neighbours=True),
    "qwen2": _Architecture("Qwen2ForCausalLM", "qwen2", _LAYER_TENSORS, _qwen),
    "qwen3": _Architecture("Qwen3ForCausalLM", "qwen3", _LAYER_TENSORS, _qwen),
    "gemma3": _Architecture("Gemma3ForCausalLM", "gemma3_text", _GEMMA_LAYER_TENSORS, _gemma3, norms_plus_one=True),
}


def architecture_of(file: GgufFile) -> _Architecture:
    if file.architecture not in ARCHITECTURES:
        raise StartupError(
            f"{file.path}: GGUF architecture {file.architecture!r} is not supported; known are "
            f"{', '.join(ARCHITECTURES)}; take the model's safetensors instead"
        )
    if file.metadata.get(f"{file.architecture}.expert_count"):
        raise StartupError(
            f"{file.path}: GGUF files with experts are not supported; take the model's safetensors instead"
        )
    return ARCHITECTURES[file.architecture]


def config_of(file: GgufFile) -> dict[str, object]:
    """Raises `StartupError` that names what is missing or not supported."""
    architecture, metadata = architecture_of(file), _Metadata(file)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise StartupError(f"{file.path} lacks tensor token_embd.weight; download it again")
    ids = {name: file.metadata.get(f"tokenizer.ggml.{key}") for name, key in _SPECIAL_IDS.items()}
    num_heads = metadata.integer("attention.head_count")
    return {
        "architectures": [architecture.causal_lm],
        "model_type": architecture.model_type,
        "hidden_act": "silu",
        "vocab_size": embedding.shape[0],
        "hidden_size": metadata.integer("embedding_length"),
        "intermediate_size": metadata.integer("feed_forward_length"),
        "num_hidden_layers": metadata.integer("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata.integer("attention.head_count_kv", num_heads),
        "head_dim": _head_dim(metadata),
        "max_position_embeddings": metadata.integer("context_length"),
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "dtype": _dtype(file),
        **{name: value for name, value in ids.items() if value is not None},
        **architecture.flags(metadata),
    }


_SPECIAL_IDS = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}


def end_token_ids(file: GgufFile) -> list[int]:
    """Ids that end an answer: the ends of a text, a turn and a message, and such by their well-known names."""
    values = [file.metadata.get(f"tokenizer.ggml.{key}") for key in ("eos_token_id", "eot_token_id", "eom_token_id")]
    ids = {value for value in values if isinstance(value, int)}
    tokens, types = (file.metadata.get(f"tokenizer.ggml.{key}") for key in ("tokens", "token_type"))
    if isinstance(tokens, list) and isinstance(types, list):
        wanted = set(_ENDS_OF_TURN)
        ids |= {
            i for i, token in enumerate(tokens) if token in wanted and i < len(types) and types[i] in _CONTROL_TYPES
        }
    return sorted(ids)


def hugging_face_name(file: GgufFile, name: str) -> str | None:
    """What transformers calls a tensor; None for one that it does not have."""
    stem, _, suffix = name.rpartition(".")
    if stem in _TENSORS:
        return f"{_TENSORS[stem]}.{suffix}"
    block, _, rest = stem.partition(".")
    index, _, part = rest.partition(".")
    known = architecture_of(file).layer_tensors
    return f"model.layers.{index}.{known[part]}.{suffix}" if block == "blk" and part in known else None


def _head_dim(metadata: _Metadata) -> int:
    heads = metadata.integer("embedding_length") // metadata.integer("attention.head_count")
    head_dim = metadata.integer("attention.key_length", heads)
    if metadata.integer("attention.value_length", head_dim) != head_dim:
        raise StartupError(f"{metadata.file.path}: K and V of unlike sizes are not supported")
    if metadata.integer("rope.dimension_count", head_dim) != head_dim:
        raise StartupError(f"{metadata.file.path}: heads that are rotated in part are not supported")
    return head_dim


def _rope(metadata: _Metadata, default_theta: float = 10000.0) -> dict[str, object]:
    theta = float(metadata.number("rope.freq_base", default_theta))
    kind = metadata.file.metadata.get(f"{metadata.file.architecture}.rope.scaling.type", "none")
    factor = float(metadata.number("rope.scaling.factor", metadata.number("rope.scale_linear", 1.0)))
    if factor != 1.0 and not metadata.has("rope.scaling.type"):
        kind = "linear"
    if ROPE_FACTORS in metadata.file.tensors:
        # Divisors of the frequencies, one by one: as those of longrope, with nothing else that longrope does.
        factors = _factors(metadata.file)
        return {
            "rope_type": "longrope",
            "rope_theta": theta,
            "short_factor": factors,
            "long_factor": factors,
            "attention_factor": 1.0,
            "original_max_position_embeddings": metadata.integer("context_length"),
        }
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return {"rope_type": "default", "rope_theta": theta}
    if kind == "linear":
        return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
    if kind == "yarn":
        original = metadata.integer("rope.scaling.original_context_length")
        return {
            "rope_type": "yarn",
            "rope_theta": theta,
            "factor": factor,
            "original_max_position_embeddings": original,
        }
    raise StartupError(f"{metadata.file.path}: rope scaling {kind!r} is not supported; known are linear, yarn")


def _factors(file: GgufFile) -> list[float]:
    tensor = file.tensors[ROPE_FACTORS]
    if tensor.kind.name != "F32":
        raise StartupError(f"{file.path}: tensor {ROPE_FACTORS} is {tensor.kind.name}, not F32")
    values = np.fromfile(tensor.path, dtype="<f4", count=tensor.num_elements, offset=tensor.start)
    return [float(value) for value in values]


def _dtype(file: GgufFile) -> str:
    """The dtype of the matrices; bfloat16 for quantised ones, since most were made from that."""
    names = {tensor.kind.name for tensor in file.tensors.values() if len(tensor.shape) > 1}
    return {"F32": "float32", "F16": "float16"}.get(next(iter(names)), "bfloat16") if len(names) == 1 else "bfloat16"
