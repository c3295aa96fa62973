"""Architectures by the name that config.json gives them: Baton's own decoder, else transformers' code."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from common.errors import StartupError
from common.model_files import ModelFiles
from engine.loading.checkpoints.own_head import has_own_head
from engine.models.base import CausalLM, ConfigReader
from engine.models.config_classes import find_config_class
from engine.models.decoder import Decoder
from engine.models.families import FAMILIES, describe, read_family_config
from engine.models.leftovers import is_leftover
from engine.models.positions import max_length
from engine.models.stage import Stage
from engine.models.text_part import is_composite, text_architecture, text_config, text_name
from engine.models.transformers_model import TransformersModel, is_mxfp4
from engine.models.verified import REFUSED, VERIFIED
from engine.ranks.group import RankGroup

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

log = logging.getLogger(__name__)


def architecture_of(files: ModelFiles) -> str:
    """Name of the architecture, one of `FAMILIES` or one that transformers has, compared with Baton's results
    (engine/models/verified.py). Raises `StartupError` that says why another one is refused."""
    names = files.config.get("architectures")
    model_type = str(files.config.get("model_type"))
    served = VERIFIED.get(model_type, "")
    for name in names if isinstance(names, list) else []:
        if name in FAMILIES:
            return str(name)
        if served and str(name).lower() == served.lower():  # Phi-3.5-MoE says PhiMoEForCausalLM
            return served
    if is_composite(files.config):
        return text_architecture(files.config)
    if model_type in REFUSED:
        raise StartupError(f"model {files.path}: model type {model_type} is not supported: {REFUSED[model_type]}")
    if model_type in VERIFIED:
        raise StartupError(
            f"model {files.path}: architecture {names!r} is not supported; of model type {model_type}, "
            f"{VERIFIED[model_type]} is"
        )
    raise StartupError(
        f"model {files.path}: architecture {names!r} is not supported; Baton's own are {', '.join(sorted(FAMILIES))}, "
        "docs/models.md lists all"
    )


def is_read(files: ModelFiles, name: str) -> bool:
    """Whether the tensor `name` of a checkpoint becomes a part of the model."""
    if is_composite(files.config):
        return text_name(name) is not None
    if name == "lm_head.weight" and files.config.get("tie_word_embeddings") is True:
        return has_own_head(files)
    return not is_leftover(name)


def max_positions(files: ModelFiles) -> int:
    """Longest sequence in tokens that the model was made for."""
    architecture = architecture_of(files)
    if architecture in FAMILIES:
        return read_family_config(architecture, _family_config(files)).max_positions
    length = max_length(_transformers_config(files.config))
    return ConfigReader({"max_position_embeddings": length}).integer("max_position_embeddings", 2048)


def build_model(
    files: ModelFiles,
    *,
    num_positions: int,
    dtype: torch.dtype,
    device: torch.device,
    group: RankGroup | None = None,
    deals_experts: bool = False,
    stage: Stage | None = None,
) -> CausalLM:
    """The model, or this rank's part of it or of one `stage`, its weights still to be loaded. `deals_experts`: of a
    mixture each rank has some experts whole, in place of a part of each. Raises `StartupError` if the ranks of `group`
    cannot share it, or if it has no such stages."""
    architecture = architecture_of(files)
    if architecture not in FAMILIES:
        if stage is not None and stage.count > 1:
            raise StartupError(
                f"--pipeline-parallel-size {stage.count}: model type {files.config.get('model_type')} runs on "
                "transformers' code, which has no stages; Baton's own decoders do"
            )
        config = _transformers_config(files.config)
        if getattr(config, "tie_word_embeddings", False):
            _is_tied(files)  # transformers decides; this says so
        return TransformersModel(
            config, num_positions=num_positions, dtype=dtype, device=device, group=group, deals_experts=deals_experts
        )
    if is_composite(files.config):
        log.info("the text part of the model is served, without images", extra={"architecture": architecture})
    description = describe(architecture, read_family_config(architecture, _family_config(files)), num_positions)
    if description.tie_word_embeddings and not _is_tied(files):
        description = replace(description, tie_word_embeddings=False)
    return Decoder(
        description,
        num_positions=num_positions,
        dtype=dtype,
        device=device,
        group=group,
        deals_experts=deals_experts,
        stage=stage,
    )


def _is_tied(files: ModelFiles) -> bool:
    """Whether the head is the embedding, of a model whose config says so. Logs if the files say something else."""
    if is_composite(files.config) or not has_own_head(files):  # the files decided already if it is composite
        return True
    log.warning(
        "tie_word_embeddings is true, but the files hold a head unlike the embedding: they are not tied",
        extra={"model": str(files.path)},
    )
    return False


def _family_config(files: ModelFiles) -> Mapping[str, object]:
    return text_config(files) if is_composite(files.config) else files.config


def _with_floats(config: Mapping[str, object]) -> dict[str, object]:
    """The config with the numbers that JSON lacks. transformers writes them as {"__float__": "Infinity"}."""

    def number(entry: dict[str, object]) -> object:
        return float(str(entry["__float__"])) if entry.keys() == {"__float__"} else entry

    result: dict[str, object] = json.loads(json.dumps(config), object_hook=number)
    return result


def _transformers_config(config: Mapping[str, object]) -> PreTrainedConfig:
    quantized = config.get("quantization_config")
    if quantized and not is_mxfp4(config):
        method = quantized.get("quant_method") if isinstance(quantized, Mapping) else None
        raise StartupError(
            f"config.json: quantization_config of {method or 'an unknown method'} is not supported by an architecture "
            "that runs on transformers' code, but for mxfp4; take a checkpoint without it"
        )
    try:
        result = find_config_class(str(config["model_type"])).from_dict(_with_floats(config))
    except Exception as error:  # of many classes, some of them private
        raise StartupError(f"config.json: {' '.join(str(error).split())}") from error
    return result
