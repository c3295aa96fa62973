"""Weights from a checkpoint's files straight into place, tensor by tensor: never a second whole copy of the model.

A place may be for a part of a tensor, if other ranks have the rest. Of a plain tensor, and of rows of GGUF, no more
than that part is read. What Hugging Face's formats hold quantised is read whole, one matrix after the other. Tensors
that only other ranks need are not read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from safetensors import safe_open

from common.errors import StartupError
from common.model_files import ModelFiles
from engine.kernels.grouped import QuantizedTensor
from engine.kernels.library import Kernels
from engine.layers import MatrixPlace, PartPlace, Place
from engine.loading.checkpoints.checkpoint import CheckpointTensor, readable
from engine.loading.checkpoints.hf_quantized import quantized_tensors, scheme_of
from engine.loading.checkpoints.part import NOTHING, Part, PartOfQuantized
from engine.loading.checkpoints.safetensors_file import SafetensorsFile
from engine.loading.progress import LOG_INTERVAL_S, Progress

log = logging.getLogger(__name__)


def load_weights(
    files: ModelFiles,
    places: Mapping[str, Place],
    *,
    kernels: Kernels | None = None,
    may_skip: Callable[[str], bool] = lambda _: False,
    rename: Callable[[str], str | None] = str,
    log_interval_s: float = LOG_INTERVAL_S,
) -> int | None:
    """Copies each tensor of the files into its place, converting dtype and device on the way.

    `places` names every tensor that the model needs and where it goes; a place may be a part of a merged weight.
    A quantised matrix stays so if there are `kernels`. `rename` gives a name in the files its name in `places`, None if
    the tensor is of no use. `may_skip` says of a name that has no place whether that is all right. Returns how many
    bytes of plain safetensors were read; None for other formats. Raises `StartupError` that names a tensor which is
    missing, not known, or of another shape.

    What is read shows on a terminal as a bar, elsewhere as a line in the log every `log_interval_s`.
    """
    is_plain = not files.is_gguf and scheme_of(files.config) is None
    num_bytes = sum(file.stat().st_size for file in files.weight_files)
    formats: dict[str, int] = {}
    missing = set(places)
    bytes_read = _BytesRead()

    def part_of(name: str) -> Part | None:
        new = rename(name)
        place = None if new is None else places.get(new)
        if place is None:  # it has no use here: not even read ahead
            return NOTHING
        return place.part if isinstance(place, PartPlace) else None

    def is_needed(name: str) -> bool:
        new = rename(name)
        return new is not None and (new in places or not may_skip(new))

    with Progress("loading weights", num_bytes, "B", log_interval_s=log_interval_s) as progress:
        for each in _tensors(files, part_of, is_needed, bytes_read):
            name = rename(each.name)
            if name is None:
                progress.add(each.num_bytes)
                continue
            place = places.get(name)
            if place is None:
                if not may_skip(name):
                    raise StartupError(f"{each.file} has tensor {each.name}, which this architecture does not know")
                continue
            _fill(place, each, kernels, packs=is_plain)
            formats[each.format] = formats.get(each.format, 0) + 1
            progress.add(each.num_bytes)
            missing.discard(name)
    if missing:
        first = min(missing)
        others = f" and {len(missing) - 1} others" if len(missing) > 1 else ""
        raise StartupError(f"model {files.path} lacks tensor {first}{others}; download it again")
    _log_formats(files, formats, kernels)
    num_bytes_read = bytes_read.count if is_plain else None
    facts = {"model": str(files.path), "tensors": len(places)}
    log.info("weights loaded", extra=facts if num_bytes_read is None else facts | {"bytes_read": num_bytes_read})
    return num_bytes_read


@dataclass(slots=True)
class _BytesRead:
    count: int = 0


def _tensors(
    files: ModelFiles,
    part_of: Callable[[str], Part | None],
    is_needed: Callable[[str], bool],
    bytes_read: _BytesRead,
) -> Iterator[CheckpointTensor]:
    if files.is_gguf:
        from engine.loading.checkpoints.gguf_weights import gguf_tensors

        return gguf_tensors(files.weight_files[0])
    scheme = scheme_of(files.config)
    if scheme is not None:
        return quantized_tensors(files, scheme, is_needed)
    return _safetensors(files, part_of, bytes_read)


def _fill(place: Place, each: CheckpointTensor, kernels: Kernels | None, *, packs: bool) -> None:
    """`packs`: matrices go straight into the kernels' layout, if there are kernels."""
    tensor = each.tensor
    if tuple(tensor.shape) != tuple(place.shape):
        raise StartupError(
            f"{each.file}: tensor {each.name} has shape {list(tensor.shape)}, config.json asks for {list(place.shape)}"
        )
    part = place.part if isinstance(place, PartPlace) else None
    place = place.place if isinstance(place, PartPlace) else place
    if not isinstance(tensor, QuantizedTensor):
        if not tensor.dtype.is_floating_point or tensor.dtype.itemsize < 2:
            raise StartupError(
                f"{each.file}: tensor {each.name} is {tensor.dtype}. It looks quantised, but config.json has no "
                "quantization_config that says how; take another checkpoint of this model"
            )
        if isinstance(tensor, torch.Tensor):
            _put(place, 0, tensor if part is None else part.of(tensor), kernels if packs else None)
            return
        with readable(each.file):
            for start, rows in tensor.pieces():
                _put(place, start, rows, kernels if packs else None)
        return
    if isinstance(place, torch.Tensor):
        raise StartupError(f"{each.file}: tensor {each.name} is quantised as {each.format}, and no matrix")
    if part is not None:
        tensor = PartOfQuantized(tensor, part, f"{each.file}: tensor {each.name}")
    if kernels is not None:
        if kernels.quantization != "none":
            raise StartupError(f"{each.file} is quantised already ({each.format}); take away --quantization")
        place.take(tensor, kernels)
        return
    plain = place.plain()
    for start, stop in tensor.pieces():
        plain[start:stop].copy_(tensor.rows(start, stop).dequantize())


def _put(place: torch.Tensor | MatrixPlace, start: int, rows: torch.Tensor, kernels: Kernels | None) -> None:
    """Rows of a plain tensor from number `start` on, packed if there are `kernels` and the place packs."""
    if isinstance(place, torch.Tensor):
        plain = place
    elif kernels is None or not place.pack(start, rows, kernels):
        plain = place.plain()
    else:
        return
    (plain[start : start + rows.shape[0]] if rows.dim() else plain).copy_(rows)


def _log_formats(files: ModelFiles, formats: Mapping[str, int], kernels: Kernels | None) -> None:
    """Says what quantised weights became, if there are any."""
    counts = ", ".join(f"{name}: {count}" for name, count in sorted(formats.items()) if name)
    if counts and kernels is None:
        log.warning(
            "there are no kernels for quantised weights here, they are widened and take the memory of a plain model",
            extra={"model": str(files.path), "quantised": counts},
        )
    elif counts:
        log.info("quantised weights stay as they are", extra={"model": str(files.path), "quantised": counts})


def check_files(files: ModelFiles) -> None:
    """Raises `StartupError` that names a file which cannot be read, or is not whole. Reads their heads alone."""
    if files.is_gguf:
        from engine.loading.checkpoints.gguf_file import read_gguf  # what it imports takes long, and few files need it

        read_gguf(files.weight_files[0])
        return
    for file in files.weight_files:
        with readable(file), safe_open(file, framework="pt"):
            pass


def _safetensors(
    files: ModelFiles, part_of: Callable[[str], Part | None], bytes_read: _BytesRead
) -> Iterator[CheckpointTensor]:
    """The tensors in the order in which they lie in the files, so that a disk reads front to back."""
    for path in files.weight_files:
        with readable(path), SafetensorsFile(path, part_of) as file:
            for tensor in file.tensors:
                yield CheckpointTensor(path, tensor.name, tensor, tensor.nbytes)
            bytes_read.count += file.num_bytes_read
