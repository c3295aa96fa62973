"""Weights from safetensors files straight into place, tensor by tensor: never a second whole copy of the model."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from common.errors import StartupError
from common.model_files import ModelFiles

log = logging.getLogger(__name__)

_LOG_INTERVAL_S = 5.0


def load_weights(
    files: ModelFiles, places: Mapping[str, torch.Tensor], *, may_skip: Callable[[str], bool] = lambda _: False
) -> None:
    """Copies each tensor of the files into its place, converting dtype and device on the way.

    `places` names every tensor that the model needs and where it goes; a place may be a view of a merged weight.
    `may_skip` says of a name that has no place whether that is all right. Raises `StartupError` that names a tensor
    which is missing, not known, or of another shape.

    What is read shows on a terminal as a bar, elsewhere as a line in the log every few seconds.
    """
    progress = _Progress(sum(file.stat().st_size for file in files.weight_files))
    try:
        _load(files, places, may_skip, progress)
    finally:
        progress.close()
    log.info("weights loaded", extra={"model": str(files.path), "tensors": len(places)})


class _Progress:
    def __init__(self, num_bytes: int) -> None:
        self._num_bytes, self._num_read = num_bytes, 0
        self._logged_at = time.monotonic()
        self._bar = tqdm(total=num_bytes, unit="B", unit_scale=True, desc="weights", disable=None, leave=False)

    def add(self, num_bytes: int) -> None:
        self._num_read += num_bytes
        self._bar.update(num_bytes)
        if self._bar.disable and time.monotonic() > self._logged_at + _LOG_INTERVAL_S:
            self._logged_at = time.monotonic()
            log.info("loading weights", extra={"percent": 100 * self._num_read // self._num_bytes})

    def close(self) -> None:
        self._bar.close()


def check_files(files: ModelFiles) -> None:
    """Raises `StartupError` that names a file which is no safetensors file, or not whole. Reads their heads alone."""
    for file in files.weight_files:
        with _readable(file), safe_open(file, framework="pt"):
            pass


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise StartupError(f"{file} is not a readable safetensors file ({error}); download it again") from error


def _load(
    files: ModelFiles,
    places: Mapping[str, torch.Tensor],
    may_skip: Callable[[str], bool],
    progress: _Progress,
) -> None:
    missing = set(places)
    for file in files.weight_files:
        with _readable(file), safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (it is no dict)
                place = places.get(name)
                if place is None:
                    if not may_skip(name):
                        raise StartupError(f"{file} has tensor {name}, which this architecture does not know")
                    continue
                tensor = tensors.get_tensor(name)
                if tensor.shape != place.shape:
                    raise StartupError(
                        f"{file}: tensor {name} has shape {list(tensor.shape)}, "
                        f"config.json asks for {list(place.shape)}"
                    )
                if not tensor.is_floating_point() or tensor.itemsize < 2:
                    raise StartupError(f"{file}: tensor {name} is {tensor.dtype}; quantised weights cannot be read")
                place.copy_(tensor)
                progress.add(tensor.nbytes)
                missing.discard(name)
    if missing:
        first = min(missing)
        others = f" and {len(missing) - 1} others" if len(missing) > 1 else ""
        raise StartupError(f"model {files.path} lacks tensor {first}{others}; download it again")
