"""What any kind of checkpoint is read as."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from engine.kernels.grouped import QuantizedTensor


@dataclass(slots=True, frozen=True)
class CheckpointTensor:
    """A tensor of a checkpoint by its name in transformers; what is quantised is read when it is needed."""

    file: Path
    name: str
    tensor: torch.Tensor | QuantizedTensor
    num_bytes: int  # in the file
    format: str = ""  # of a quantised one
