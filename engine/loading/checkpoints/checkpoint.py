"""What any kind of checkpoint is read as."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError

from common.errors import StartupError
from engine.kernels.grouped import QuantizedTensor
from engine.loading.checkpoints.safetensors_file import TensorInFile


@dataclass(slots=True, frozen=True)
class CheckpointTensor:
    """A tensor of a checkpoint, under its name in transformers. Only a plain one of GGUF is read already."""

    file: Path
    name: str
    tensor: torch.Tensor | TensorInFile | QuantizedTensor
    num_bytes: int  # in the file
    format: str = ""  # of a quantised one


@contextmanager
def readable(file: Path) -> Iterator[None]:
    """Turns errors inside of the block into a `StartupError` that names `file`."""
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise StartupError(f"{file} is not a readable safetensors file ({error}); download it again") from error
