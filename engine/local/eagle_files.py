"""EAGLE heads as they are published: a directory with config.json and tensors in one or several files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from common.errors import StartupError
from engine.local.device import LocalDevice
from engine.local.eagle3_head import Eagle3Head
from engine.local.eagle_head import EagleHead
from engine.local.head_files import read_config, read_tensors, tensor_names
from engine.models.description import DecoderConfig
from engine.models.families import describe, read_family_config

_ONE_FILE = ("model.safetensors", "pytorch_model.bin")
# What the layer's shape follows from. Other keys of a published config.json are for training.
_KEYS = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act"),
    *("rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings", "vocab_size"),
)


def is_eagle(path: Path) -> bool:
    """Whether a directory has an EAGLE head rather than a model. The config.json of most of them is that of a Llama."""
    architectures = read_config(path).get("architectures")
    if isinstance(architectures, list) and any("eagle" in str(name).lower() for name in architectures):
        return True
    files = _files(path)
    return bool(files) and any("fc.weight" in tensor_names(file) for file in files)


def read_head(path: Path, device: LocalDevice) -> EagleHead:
    """The head in `path`, for the model of `device`. Raises `StartupError`."""
    files = _files(path)
    if not files:
        raise StartupError(f"--speculation {path}: an EAGLE head is in none of {', '.join(_ONE_FILE)}")
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        tensors |= read_tensors(file)
    return head_of(read_config(path), tensors, device, f"--speculation {path}")


def head_of(
    config: Mapping[str, object], tensors: Mapping[str, torch.Tensor], device: LocalDevice, source: str
) -> EagleHead:
    """The head of a checkpoint with `config`, its config.json, and `tensors`, for the model of `device`. Raises
    `StartupError` that names what is missing or does not fit."""
    tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    if config.get("num_hidden_layers", 1) != 1:
        raise StartupError(f"{source}: num_hidden_layers is {config['num_hidden_layers']}; EAGLE heads have one layer")
    layer_name = "midlayer" if any(name.startswith("midlayer.") for name in tensors) else "layers.0"
    description = _describe(config, tensors, layer_name, device, source)
    is_third = "d2t" in tensors or f"{layer_name}.hidden_norm.weight" in tensors
    head: EagleHead
    if is_third:
        layers = layers_of(config, device.info.spec.num_layers, source)
        norms_residual = bool(config.get("norm_before_residual", False))
        head = Eagle3Head(description, tensors, device, layer_name, layers, norms_residual=norms_residual)
    elif description.hidden_size != device.info.hidden_size:
        raise StartupError(
            f"{source}: hidden_size is {description.hidden_size}, that of the model is {device.info.hidden_size}"
        )
    else:
        head = EagleHead(description, tensors, device, layer_name)
    head.fill(tensors, source)
    return head


def layers_of(config: Mapping[str, object], num_layers: int, source: str) -> list[int]:
    """The layers of the model whose inputs an EAGLE-3 head continues: three, unless its config.json names others. There
    the list at the top has their numbers, and one in `eagle_config` those of the layers before them."""
    given, before = config.get("eagle_aux_hidden_state_layer_ids"), 0
    if not given and isinstance(nested := config.get("eagle_config"), Mapping):
        given, before = nested.get("eagle_aux_hidden_state_layer_ids"), 1
    if not given:
        layers = [2, num_layers // 2, num_layers - 3]
    elif isinstance(given, list) and all(isinstance(one, int) for one in given):
        layers = [one + before for one in given]
    else:
        raise StartupError(f"{source}: eagle_aux_hidden_state_layer_ids has to be a list of integers, not {given!r}")
    if layers != sorted(set(layers)) or layers[0] < 0 or layers[-1] >= num_layers:
        raise StartupError(
            f"{source}: the head continues what the layers {layers} begin with, the model has {num_layers} layers; "
            "they have to be distinct and ascending"
        )
    return layers


def _describe(
    config: Mapping[str, object], tensors: Mapping[str, torch.Tensor], layer: str, device: LocalDevice, source: str
) -> DecoderConfig:
    """The layer as that of a Llama. The files tell which biases it has."""
    architecture = "LlamaForCausalLM"
    known: dict[str, object] = {"architectures": [architecture], "num_hidden_layers": 1}
    layer_config = config.get("transformer_layer_config", config)
    if not isinstance(layer_config, Mapping):
        raise StartupError(f"{source}: transformer_layer_config has to be an object")
    known |= {key: layer_config[key] for key in _KEYS if layer_config.get(key) is not None}
    try:
        described = describe(architecture, read_family_config(architecture, known), device.info.max_model_len)
    except StartupError as error:
        raise StartupError(f"{source}: {error}") from error
    return replace(
        described,
        tie_word_embeddings=False,
        qkv_bias=f"{layer}.self_attn.q_proj.bias" in tensors,
        out_bias=f"{layer}.self_attn.o_proj.bias" in tensors,
        mlp_bias=f"{layer}.mlp.down_proj.bias" in tensors,
    )


def _files(path: Path) -> list[Path]:
    one = next((path / name for name in _ONE_FILE if (path / name).is_file()), None)
    return sorted(path.glob("model-*.safetensors")) if one is None else [one]
