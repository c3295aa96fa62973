"""A GGUF file as a model's directory: config.json and the tokenizer's files made from its metadata, once, in the cache.

The directory refers to the file by a link, and its name is a hash of the file's content, so that another file gets
another directory. Of a model in parts (common/gguf_parts.py), the file is the first part, and the hash is that of all.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

from common.errors import StartupError
from common.gguf_parts import parts_of
from common.model_files import GGUF_WEIGHTS, gguf_identity
from engine.loading.checkpoints.model_cache import make_once

_REVISION = "r2"  # of the directory; goes up when what is written changes


def gguf_directory(file: Path, models: Path) -> Path:
    """The directory of `file` under `models`, whether it was made or not."""
    identities = [gguf_identity(part) for part in parts_of(file)]
    identity = identities[0]
    if len(identities) > 1:
        identity = hashlib.blake2b(" ".join(identities).encode(), digest_size=16).hexdigest()
    return models / f"{file.stem}-{identity[:16]}-{_REVISION}"


def found_directory(file: Path, models: Path) -> Path | None:
    """The directory if it was made, and refers to `file`."""
    target = gguf_directory(file, models)
    if not target.is_dir():
        return None
    link = target / GGUF_WEIGHTS
    if not link.exists() or not link.samefile(file):  # the file was moved since, or there is a copy of it
        try:
            _link(link, file)
        except OSError as error:
            raise StartupError(f"cannot refer to {file} in {target} ({error}); set --cache-dir") from error
    return target


def ensure_directory(file: Path, models: Path, report: Callable[[str], None]) -> Path:
    """The directory of `file` under `models`, made if need be. Raises `StartupError` naming what is not supported."""
    found = found_directory(file, models)
    if found is not None:
        return found
    target = gguf_directory(file, models)
    make_once(target, f"the tokenizer of {file.name}", lambda folder: _make(file, folder, report), report)
    return found_directory(file, models) or target


def _link(link: Path, file: Path) -> None:
    fresh = link.with_name(f".{link.name}.{os.getpid()}")
    fresh.unlink(missing_ok=True)
    # The name of a part finds the others, which the file behind a link of that name may not have.
    fresh.symlink_to(file.resolve() if len(parts_of(file)) == 1 else file.absolute())
    fresh.replace(link)


def _make(file: Path, folder: Path, report: Callable[[str], None]) -> None:
    report(f"reading {file.name} (once): config and tokenizer")
    try:
        from engine.loading.checkpoints.gguf_config import config_of, end_token_ids
        from engine.loading.checkpoints.gguf_file import read_gguf
    except ImportError as error:
        raise StartupError(f"cannot read {file}: {error}; pip install 'baton-serve[engine]'") from error
    gguf = read_gguf(file)
    _write_json(folder / "config.json", config_of(gguf))
    _write_json(folder / "generation_config.json", {"eos_token_id": end_token_ids(gguf)})
    _link(folder / GGUF_WEIGHTS, file)
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported
    from transformers import PreTrainedTokenizerFast
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(file.parent, gguf_file=file.name)
        tokenizer.save_pretrained(folder)
    except Exception as error:  # of many kinds, some of them Rust's
        reason = " ".join(str(error).split()) or type(error).__name__
        raise StartupError(f"{file}: transformers cannot make a tokenizer of its metadata: {reason[:300]}") from error


def _write_json(file: Path, value: dict[str, object]) -> None:
    file.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")
