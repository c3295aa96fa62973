"""EAGLE heads for tiny models: of random weights, and such as are right for given texts; and the published math of one,
in plain torch and without a cache."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.nn.functional import linear, silu
from transformers import AutoModelForCausalLM, PreTrainedModel

Weights = dict[str, torch.Tensor]

NUM_HEADS, NUM_KV_HEADS, INNER = 4, 2, 80
EPS = 1e-5
THETA = 10_000.0
LAYERS = (0, 1, 2)  # of the model, whose inputs an EAGLE-3 head continues


def head_config(hidden_size: int) -> dict[str, object]:
    """As published: that of a Llama with one layer. Tiny models have too few layers for those that EAGLE-3 takes."""
    return {
        "eagle_aux_hidden_state_layer_ids": list(LAYERS),
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden_size,
        "intermediate_size": INNER,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "vocab_size": 96,
    }


def layer_weights(name: str, hidden: int, num_in: int, generator: torch.Generator) -> Weights:
    """Of the attention and the MLP of a layer whose Q, K and V are made of `num_in` numbers."""
    head_dim = hidden // NUM_HEADS
    shapes = {
        "self_attn.q_proj": (hidden, num_in),
        "self_attn.k_proj": (NUM_KV_HEADS * head_dim, num_in),
        "self_attn.v_proj": (NUM_KV_HEADS * head_dim, num_in),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (INNER, hidden),
        "mlp.up_proj": (INNER, hidden),
        "mlp.down_proj": (hidden, INNER),
    }
    weights = {f"{name}.{part}.weight": _random(shape, generator) for part, shape in shapes.items()}
    weights[f"{name}.post_attention_layernorm.weight"] = 1 + _random((hidden,), generator)
    return weights


def random_weights(model: PreTrainedModel, seed: int = 1) -> Weights:
    """Of an EAGLE-1 head, by the published names; the embedding is the model's."""
    generator = torch.Generator().manual_seed(seed)
    hidden = model.config.hidden_size
    weights = layer_weights("layers.0", hidden, hidden, generator)
    weights["fc.weight"] = _random((hidden, 2 * hidden), generator)
    weights["fc.bias"] = _random((hidden,), generator)
    weights["embed_tokens.weight"] = model.get_input_embeddings().weight.detach().clone()
    return weights


def random_weights_3(model: PreTrainedModel, *, num_rows: int = 60, seed: int = 1) -> Weights:
    """Of an EAGLE-3 head that names `num_rows` of the model's tokens, by the published names. It has no embedding."""
    generator = torch.Generator().manual_seed(seed)
    hidden, vocab_size = model.config.hidden_size, model.config.vocab_size
    weights = layer_weights("midlayer", hidden, 2 * hidden, generator)
    for name in ("midlayer.hidden_norm", "midlayer.input_layernorm", "norm"):
        weights[f"{name}.weight"] = 1 + _random((hidden,), generator)
    weights["fc.weight"] = _random((hidden, len(LAYERS) * hidden), generator)
    weights["lm_head.weight"] = _random((num_rows, hidden), generator)
    chosen = torch.randperm(vocab_size, generator=generator)[:num_rows].sort().values
    weights["d2t"] = chosen - torch.arange(num_rows)
    weights["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, chosen, True)
    return weights


def right_weights_3(model: PreTrainedModel, texts: Sequence[Sequence[int]]) -> Weights:
    """Whose layer adds nothing and whose head names the token after the next one of `texts`, by least squares. There
    have to be fewer tokens than the states are wide. What it guesses after that is the same token again."""
    weights = random_weights_3(model, num_rows=model.config.vocab_size)
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        weights[f"midlayer.{name}.weight"].zero_()
    normed = [rms_norm(_states(model, weights, text)[:-2], weights["norm.weight"]) for text in texts]
    wanted = torch.tensor([token_id for text in texts for token_id in text[2:]])
    rows = torch.nn.functional.one_hot(wanted, model.config.vocab_size).double()
    weights["lm_head.weight"] = (torch.linalg.pinv(torch.cat(normed).double()) @ rows).T.float().contiguous()
    return weights


def right_weights(
    model: PreTrainedModel, texts: Sequence[Sequence[int]], starts: Sequence[int] | None = None
) -> Weights:
    """Whose layer adds nothing and whose `fc` gives the state of each next token of `texts`, by least squares. There
    have to be fewer tokens than twice the width of the states. `starts`: the first token of each text that the head
    sees, 0 if None."""
    weights = random_weights(model)
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        weights[f"layers.0.{name}.weight"].zero_()
    weights["fc.bias"].zero_()
    given, wanted = [], []
    for text, start in zip(texts, starts or [0] * len(texts), strict=True):
        states = states_of(model, text)[start:]
        embeddings = weights["embed_tokens.weight"][list(text[start:])]
        given.append(torch.cat((embeddings[1:], states[:-1]), dim=-1))
        wanted.append(states[1:])
    solution = torch.linalg.pinv(torch.cat(given).double()) @ torch.cat(wanted).double()
    weights["fc.weight"] = solution.T.float().contiguous()
    return weights


@torch.inference_mode()
def states_of(model: PreTrainedModel, text: Sequence[int]) -> torch.Tensor:
    """Of each token, what the model's head is given: `[len(text), hidden_size]`."""
    states: torch.Tensor = model.base_model(torch.tensor([list(text)])).last_hidden_state[0]
    return states


def load(path: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    return model


def write(folder: Path, weights: Weights, config: dict[str, object], *, file: str = "model.safetensors") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    if file.endswith(".safetensors"):
        save_file(weights, folder / file)
    else:
        torch.save(weights, folder / file)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


# --------------------------------------------------------------------------------------------- reference


def guesses(
    model: PreTrainedModel, weights: Weights, text: Sequence[int], num_tokens: int, start: int = 0
) -> list[int]:
    """The tokens that a head guesses after `text` if it sees the text from token `start` on: all pairs of a state and
    the token after it, computed anew for each guess."""
    is_third = "midlayer.hidden_norm.weight" in weights
    embedding = weights.get("embed_tokens.weight", model.get_input_embeddings().weight.detach())
    states = _states(model, weights, text)[start:-1]
    token_ids = list(text[start + 1 :])
    drafted: list[int] = []
    while len(drafted) < num_tokens:
        given = embedding[token_ids]
        if is_third:
            normed = rms_norm(states, weights["midlayer.hidden_norm.weight"])
            x = torch.cat((rms_norm(given, weights["midlayer.input_layernorm.weight"]), normed), dim=-1)
            out = _layer(weights, "midlayer", x, states, start)
            row = linear(rms_norm(out[-1], weights["norm.weight"]), weights["lm_head.weight"]).argmax()
            drafted.append(int(row + weights["d2t"][row]))
        else:
            x = linear(torch.cat((given, states), dim=-1), weights["fc.weight"], weights["fc.bias"])
            out = _layer(weights, "layers.0", x, x, start)
            drafted.append(int(linear(out[-1], model.get_output_embeddings().weight).argmax()))
        states = torch.cat((states, out[-1:]))
        token_ids.append(drafted[-1])
    return drafted


@torch.inference_mode()
def _states(model: PreTrainedModel, weights: Weights, text: Sequence[int]) -> torch.Tensor:
    """What the head takes for the state of each token."""
    if "midlayer.hidden_norm.weight" not in weights:
        return states_of(model, text)
    inputs = model.base_model(torch.tensor([list(text)]), output_hidden_states=True).hidden_states
    return linear(torch.cat([inputs[layer][0] for layer in LAYERS], dim=-1), weights["fc.weight"])


def _layer(weights: Weights, name: str, x: torch.Tensor, residual: torch.Tensor, start: int) -> torch.Tensor:
    """A layer on `x`, of tokens at positions `start` and further, added to `residual`."""
    hidden = residual.shape[1]
    head_dim = hidden // NUM_HEADS

    def product(part: str, value: torch.Tensor) -> torch.Tensor:
        return linear(value, weights[f"{name}.{part}.weight"])

    q, k, v = (product(f"self_attn.{part}_proj", x).view(len(x), -1, head_dim).transpose(0, 1) for part in "qkv")
    positions = torch.arange(start, start + len(x))
    q, k = _rotated(q, positions), _rotated(k, positions)
    k, v = (each.repeat_interleave(NUM_HEADS // NUM_KV_HEADS, dim=0) for each in (k, v))
    scores = (q @ k.transpose(1, 2)) / head_dim**0.5
    ahead = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
    seen = scores.masked_fill(ahead, float("-inf")).softmax(-1) @ v
    out = residual + product("self_attn.o_proj", seen.transpose(0, 1).flatten(1))
    normed = rms_norm(out, weights[f"{name}.post_attention_layernorm.weight"])
    return out + product("mlp.down_proj", silu(product("mlp.gate_proj", normed)) * product("mlp.up_proj", normed))


def _rotated(heads: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    half = heads.shape[-1] // 2
    angles = positions[:, None] / THETA ** (torch.arange(half) / half)
    first, second = heads[..., :half], heads[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight


def _random(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return 0.2 * torch.randn(shape, generator=generator)
