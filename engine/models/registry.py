"""Architectures by the name that config.json gives them."""

from __future__ import annotations

import torch

from common.errors import StartupError
from common.model_files import ModelFiles
from engine.models.base import CausalLM
from engine.models.decoder import Decoder
from engine.models.families import FAMILIES, describe, read_family_config


def architecture_of(files: ModelFiles) -> str:
    """Name of the architecture, known to be in `FAMILIES`. Raises `StartupError` that lists those."""
    names = files.config.get("architectures")
    for name in names if isinstance(names, list) else []:
        if name in FAMILIES:
            return str(name)
    raise StartupError(
        f"model {files.path}: architecture {names!r} is not supported; known are {', '.join(sorted(FAMILIES))}"
    )


def max_positions(files: ModelFiles) -> int:
    """Longest sequence in tokens that the model was made for."""
    return read_family_config(architecture_of(files), files.config).max_positions


def build_model(files: ModelFiles, *, num_positions: int, dtype: torch.dtype, device: torch.device) -> CausalLM:
    """The model, its weights still to be filled."""
    architecture = architecture_of(files)
    config = describe(architecture, read_family_config(architecture, files.config), num_positions)
    return Decoder(config, num_positions=num_positions, dtype=dtype, device=device)
