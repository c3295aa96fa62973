"""Files of heads that guess: tensors by their names, in safetensors or as torch saves them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from common.errors import StartupError
from common.model_files import read_safetensors_header


def read_config(path: Path) -> dict[str, object]:
    """config.json of a directory; empty if there is none that can be read."""
    try:
        config = json.loads((path / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def read_tensors(file: Path) -> dict[str, torch.Tensor]:
    """Raises `StartupError` that names the file."""
    try:
        tensors = load_file(file) if file.suffix == ".safetensors" else torch.load(file, "cpu", weights_only=True)
    except (OSError, SafetensorError, RuntimeError, ValueError, EOFError) as error:
        raise StartupError(f"--speculation {file} cannot be read: {' '.join(str(error).split())[:200]}") from error
    except Exception as error:  # what unpickling raises, of many classes
        raise StartupError(f"--speculation {file} is no file of tensors: {type(error).__name__}") from error
    if not isinstance(tensors, dict) or not all(isinstance(one, torch.Tensor) for one in tensors.values()):
        raise StartupError(f"--speculation {file} is no file of tensors by their names")
    return tensors


def tensor_names(file: Path) -> set[str]:
    """Without reading the tensors, if the file's format allows that. Raises `StartupError` that names the file."""
    if file.suffix == ".safetensors":
        header, _ = read_safetensors_header(file)
        return set(header) - {"__metadata__"}
    try:
        tensors = torch.load(file, "cpu", weights_only=True, mmap=True)
    except Exception:  # of an old format, which cannot be mapped, or of none
        return set(read_tensors(file))
    return set(tensors) if isinstance(tensors, dict) else set()
