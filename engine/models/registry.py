"""Architectures by the name that config.json gives them."""

from __future__ import annotations

import torch

from common.errors import StartupError
from common.model_files import ModelFiles
from engine.models.base import CausalLM, ConfigReader
from engine.models.llama import Llama

ARCHITECTURES: dict[str, type[Llama]] = {"LlamaForCausalLM": Llama}


def architecture_of(files: ModelFiles) -> str:
    """Name of the architecture, known to be in `ARCHITECTURES`. Raises `StartupError` that lists those."""
    names = files.config.get("architectures")
    for name in names if isinstance(names, list) else []:
        if name in ARCHITECTURES:
            return str(name)
    raise StartupError(
        f"model {files.path}: architecture {names!r} is not supported; known are {', '.join(sorted(ARCHITECTURES))}"
    )


def max_positions(files: ModelFiles) -> int:
    """Longest sequence in tokens that the model was made for."""
    return ConfigReader(files.config).integer("max_position_embeddings", 2048)


def build_model(files: ModelFiles, *, num_positions: int, dtype: torch.dtype, device: torch.device) -> CausalLM:
    """The model, its weights still to be filled."""
    return ARCHITECTURES[architecture_of(files)](files.config, num_positions=num_positions, dtype=dtype, device=device)
