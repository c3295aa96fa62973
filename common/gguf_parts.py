"""The files of a GGUF model that llama-gguf-split has cut into parts: `name-00001-of-00003.gguf` and so on."""

from __future__ import annotations

import os
import re
from pathlib import Path

from common.errors import StartupError

_PART = re.compile(r"(?P<name>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.gguf)", re.IGNORECASE | re.DOTALL)
_MAX_LINKS = 40  # one after the other, as in Linux


def is_gguf_name(path: Path) -> bool:
    return path.suffix.lower() == ".gguf"


def parts_of(file: Path) -> list[Path]:
    """All parts of the model of which `file` is any part, the first one first; `file` alone if it is the whole model.

    `file` may be a link to a part: the others lie beside the first name in the chain of links that is a part's. Raises
    `StartupError` that names the parts which are missing.
    """
    named = _named_as_part(file)
    match = None if named is None else _PART.fullmatch(named.name)
    if named is None or match is None:
        return [file]
    count = int(match["count"])
    parts = [
        named.with_name(f"{match['name']}-{number:05}-of-{count:05}{match['suffix']}") for number in range(1, count + 1)
    ]
    missing = [part.name for part in parts if not part.is_file()]
    if missing or named not in parts:
        raise StartupError(
            f"{named} is one of {count} parts of a model, of which {', '.join(missing) or 'none has its number'} "
            f"{'is' if len(missing) < 2 else 'are'} missing in {named.parent}; download all of them there"
        )
    return parts


def gguf_in(folder: Path) -> Path | None:
    """The GGUF model of a folder that holds no safetensors: its first part if it has parts. None if there is no GGUF
    file. Raises `StartupError` if there are several models."""
    files = sorted(path for path in folder.iterdir() if is_gguf_name(path) and path.is_file())
    if not files or any(folder.glob("*.safetensors")):
        return None
    models = {_model_name(file) for file in files}
    if len(models) > 1:
        raise StartupError(f"{folder} holds several GGUF models ({', '.join(sorted(models))}); give --model one file")
    return parts_of(files[0])[0]


def _model_name(file: Path) -> str:
    match = _PART.fullmatch(file.name)
    return file.name if match is None else match["name"]


def _named_as_part(file: Path) -> Path | None:
    path = file
    for _ in range(_MAX_LINKS):
        if _PART.fullmatch(path.name):
            return path
        if not path.is_symlink():
            return None
        path = path.parent / os.readlink(path)
    return None
