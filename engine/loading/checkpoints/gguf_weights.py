"""The tensors of a GGUF file by the names, and with the rows, that transformers gives them."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from common.errors import StartupError
from engine.loading.checkpoints.checkpoint import CheckpointTensor
from engine.loading.checkpoints.gguf_config import ROPE_FACTORS, architecture_of, config_of, hugging_face_name
from engine.loading.checkpoints.gguf_file import GgufFile, GgufTensor, read_gguf
from engine.loading.checkpoints.gguf_tensors import COMPUTED_AS_THEY_ARE, PLAIN, GgufRows, plain_tensor

log = logging.getLogger(__name__)

_HEADS = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}


def gguf_tensors(path: Path) -> Iterator[CheckpointTensor]:
    """All tensors of a file, or of all parts of a model of which `path` is one, under their names in transformers. A
    tensor that transformers does not have keeps its own name, and is refused later."""
    file = read_gguf(path)
    architecture = architecture_of(file)
    other = Counter(t.kind.name for t in file.tensors.values() if t.kind not in COMPUTED_AS_THEY_ARE | PLAIN.keys())
    if other:
        log.info(
            "some types of GGUF are computed as 8-bit integers",
            extra={"model": str(path), "types": ", ".join(f"{name}: {count}" for name, count in sorted(other.items()))},
        )
    for tensor in file.tensors.values():
        if tensor.name == ROPE_FACTORS:
            continue  # in config.json
        name = hugging_face_name(file, tensor.name) or tensor.name
        if tensor.kind not in PLAIN:
            rows = GgufRows(tensor, _row_order(file, tensor))
            yield CheckpointTensor(tensor.path, name, rows, tensor.num_bytes, tensor.kind.name)
            continue
        values = plain_tensor(tensor)
        if architecture.norms_plus_one and tensor.name.endswith("norm.weight"):
            values = values.float() - 1
        order = _row_order(file, tensor)
        if order is not None:
            values = values[torch.from_numpy(order)]
        yield CheckpointTensor(tensor.path, name, values, tensor.num_bytes)


def _row_order(file: GgufFile, tensor: GgufTensor) -> npt.NDArray[np.int64] | None:
    """The order of rows in transformers. For rotary embedding, Llama's files pair neighbouring rows of a head, and
    transformers pairs its halves."""
    key = next((key for part, key in _HEADS.items() if f".{part}." in tensor.name), None)
    if not architecture_of(file).pairs_neighbours or key is None:
        return None
    config = config_of(file)
    num_heads = config[key]
    if not isinstance(num_heads, int) or tensor.shape[0] % (2 * num_heads):
        raise StartupError(f"{tensor.path}: tensor {tensor.name} has {tensor.shape[0]} rows for {num_heads} heads")
    return np.arange(tensor.shape[0]).reshape(num_heads, -1, 2).swapaxes(1, 2).reshape(-1)
