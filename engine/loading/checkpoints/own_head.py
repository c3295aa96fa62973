"""Whether a checkpoint that config.json calls tied has a head of its own all the same.

As in transformers: if the files hold both the embedding and a head, and their values differ, they are not tied.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import torch

from common.model_files import ModelFiles, read_safetensors_header
from engine.loading.checkpoints.checkpoint import readable
from engine.loading.checkpoints.safetensors_file import SafetensorsFile

_HEAD = "lm_head.weight"
_EMBEDDING = "embed_tokens.weight"
_QUANTISED_HEADS = ("lm_head.qweight", "lm_head.weight_packed")
_QUANTISED = ("I8", "F8_E4M3", "F8_E5M2")


def has_own_head(files: ModelFiles) -> bool:
    """Whether the files hold a head unlike the embedding. Reads both in pieces if their shapes are equal."""
    if files.is_gguf:
        return False  # config.json was made of the file
    head: tuple[Path, str] | None = None
    embedding: tuple[Path, str] | None = None
    entries = {}
    for file in files.weight_files:
        header, _ = read_safetensors_header(file)
        for name, entry in header.items():
            if name in _QUANTISED_HEADS or (name == _HEAD and _is_quantised(entry)):
                return True
            if name == _HEAD:
                head, entries[name] = (file, name), entry
            elif name.endswith(_EMBEDDING):
                embedding, entries[_EMBEDDING] = (file, name), entry
    if head is None or embedding is None or _shape(entries[_HEAD]) != _shape(entries[_EMBEDDING]):
        return False  # nothing to compare, or the loader names the shape that is wrong
    stamps = tuple((file.stat().st_size, file.stat().st_mtime_ns) for file, _ in (head, embedding))
    return _differ(head, embedding, stamps)


def _is_quantised(entry: object) -> bool:
    return isinstance(entry, dict) and entry.get("dtype") in _QUANTISED


def _shape(entry: object) -> object:
    return entry.get("shape") if isinstance(entry, dict) else None


@lru_cache(maxsize=8)  # the size of the weights is asked for several times while one model is loaded
def _differ(head: tuple[Path, str], embedding: tuple[Path, str], stamps: object) -> bool:  # noqa: ARG001
    """`stamps`: of the files, so that what is known of a file is not believed of another one of its name."""
    (head_file, head_name), (embedding_file, embedding_name) = head, embedding
    with (
        readable(head_file),
        SafetensorsFile(head_file) as one,
        readable(embedding_file),
        SafetensorsFile(embedding_file) as other,
    ):
        first = next(tensor for tensor in one.tensors if tensor.name == head_name)
        second = next(tensor for tensor in other.tensors if tensor.name == embedding_name)
        return not all(_are_equal(*rows) for rows in _side_by_side(first.pieces(), second.pieces()))


def _side_by_side(
    first: Iterator[tuple[int, torch.Tensor]], second: Iterator[tuple[int, torch.Tensor]]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The same rows of two matrices of as many rows, whose pieces may have unlike sizes."""
    rows: list[torch.Tensor] = [torch.empty(0), torch.empty(0)]
    for _, rows[0] in first:
        while len(rows[0]):
            if not len(rows[1]):
                _, rows[1] = next(second)
            count = min(map(len, rows))
            yield rows[0][:count], rows[1][:count]
            rows = [each[count:] for each in rows]


def _are_equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    if first.dtype == second.dtype:
        return torch.equal(first, second)
    return torch.equal(first.double(), second.double())
