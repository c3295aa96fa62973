"""A model directory as Hugging Face lays it out: config.json, *.safetensors, tokenizer.json. Reads it without torch.

In place of safetensors there may be one GGUF file, `weights.gguf` (engine/loading/checkpoints/gguf_model.py), or a link
of that name to a part of one (common/gguf_parts.py).

Routers read the tokenizer files, workers the weights; both name the weights by `model_identity`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from common.chat_templates import FOLDER, template_error
from common.errors import StartupError
from common.gguf_parts import is_gguf_name, parts_of
from common.token_table import read_token_ids

log = logging.getLogger(__name__)

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "config.json",
)

GGUF_WEIGHTS = "weights.gguf"

# Keys of config.json that say nothing about what the model computes.
_COSMETIC_KEYS = frozenset(
    {"_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache", "eos_token_id", "bos_token_id"}
    | {"pad_token_id", "initializer_range", "attention_dropout", "pretraining_tp"}
)
_QUANTIZATION_KEYS = ("quantization_config", "compression_config")
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}  # as safetensors names them
_DTYPE_NAMES = {name: name for name in _DTYPES.values()} | {"float": "float32", "half": "float16"}  # as torch has them
_SAMPLED_PAGES = 512  # per file
_PAGE = 4096  # bytes
_MAX_HEADER = 100_000_000  # bytes; the limit that the safetensors format sets itself


@dataclass(slots=True, frozen=True, kw_only=True)
class ModelFiles:
    """A directory that was checked: every file that serving needs is there."""

    path: Path
    config: dict[str, object]  # config.json; no dtype in it, or one of "float32", "bfloat16" and "float16"
    generation_config: dict[str, object]  # generation_config.json, empty if there is none
    weight_files: tuple[Path, ...]  # *.safetensors, sorted by name, or the parts of one GGUF file in their order

    @property
    def is_gguf(self) -> bool:
        return is_gguf_name(self.weight_files[0])

    @property
    def eos_token_ids(self) -> list[int]:
        return list(self.ends(self.token_ids()))

    def token_ids(self) -> dict[str, int]:
        """The id of each token of the tokenizer: `read_token_ids`."""
        return read_token_ids(self.path / "tokenizer.json")

    def ends(self, token_ids: Mapping[str, int]) -> dict[int, str]:
        """Ids that end an answer, and the files that name each. Those of generation_config.json if it names any, else
        of config.json, else of its text part; and the end that the tokenizer names, whose `token_ids` are given. Many
        fine-tunes name the end of a turn only there. Raises `StartupError` that names a file which is wrong."""
        ends = {token_id: name for name, ids in [self._ends_of_config()] for token_id in ids}
        name, token = self._end_of_tokenizer()
        if token is not None:
            token_id = token_ids.get(token)
            if token_id is None:
                log.warning(
                    "the tokenizer has no such token", extra={"eos_token": token, "file": str(self.path / name)}
                )
            else:
                ends[token_id] = f"{ends[token_id]}, {name}" if token_id in ends else name
        return ends

    def _ends_of_config(self) -> tuple[str, list[int]]:
        text = self.config.get("text_config")
        for source, name in (
            (self.generation_config, "generation_config.json"),
            (self.config, "config.json"),
            (text if isinstance(text, dict) else {}, "config.json"),
        ):
            value = source.get("eos_token_id")
            if value is not None:
                return name, _token_ids(value, self.path / name)
        return "", []

    def _end_of_tokenizer(self) -> tuple[str, str | None]:
        """The file that names the tokenizer's end of a text, and that token."""
        for name in ("tokenizer_config.json", "special_tokens_map.json"):
            if (self.path / name).is_file():
                config = _read_json(self.path / name, "repair or remove it")
                if "eos_token" in config:
                    token = config["eos_token"]
                    token = token.get("content") if isinstance(token, dict) else token
                    return name, token if isinstance(token, str) else None
        return "", None


def open_model(model_dir: str | Path) -> ModelFiles:
    """Checks a model directory. Raises `StartupError` with one line that says what is missing and what to do."""
    path = Path(model_dir)
    if not path.is_dir():
        raise StartupError(f"model {path} is not a directory; --model takes a Hugging Face model directory on disk")
    config = _read_json(path / "config.json", "download the whole model directory")
    weight_files = _weight_files(path)
    if not (path / "tokenizer.json").is_file():
        raise StartupError(
            f"model {path} has no tokenizer.json; save it with "
            "transformers: AutoTokenizer.from_pretrained(dir).save_pretrained(dir)"
        )
    for file in (*weight_files, *(path / name for name in TOKENIZER_FILES)):
        refuse_lfs_pointer(file)
    generation_config: dict[str, object] = {}
    if (path / "generation_config.json").is_file():
        generation_config = _read_json(path / "generation_config.json", "repair or remove it")
    config = _with_known_dtypes(config, path / "config.json")
    return ModelFiles(path=path, config=config, generation_config=generation_config, weight_files=tuple(weight_files))


def refuse_lfs_pointer(file: Path) -> None:
    """Raises `StartupError` if git has left a pointer in the place of a large file. Says nothing of a file that cannot
    be read."""
    try:
        with file.open("rb") as stream:
            is_pointer = stream.read(len(_LFS_POINTER)) == _LFS_POINTER
    except OSError:
        return
    if is_pointer:
        raise StartupError(
            f"{file} is a git-lfs pointer and not the file itself; fetch the file with `git lfs pull`, or download it"
        )


def _with_known_dtypes(config: dict[str, object], file: Path) -> dict[str, object]:
    """The config and the configs in it without a dtype that says nothing, such as "auto", and one that is known by its
    own name."""
    result: dict[str, object] = {}
    for key, value in config.items():
        if key in ("dtype", "torch_dtype") and value is not None:
            named = str(value).removeprefix("torch.")
            dtype = _DTYPE_NAMES.get(named)
            if dtype is not None:
                result[key] = dtype
            elif named != "auto":
                log.warning("a dtype that says nothing is ignored", extra={"file": str(file), key: str(value)[:100]})
        elif key.endswith("_config") and key not in _QUANTIZATION_KEYS and isinstance(value, dict):
            result[key] = _with_known_dtypes(value, file)
        else:
            result[key] = value
    return result


def tokenizer_files(model_dir: str | Path) -> dict[str, bytes]:
    """Contents of what a tokenizer, chat template and stop ids are read from, by file name; those that exist."""
    path = Path(model_dir)
    if not (path / "tokenizer.json").is_file():
        raise StartupError(f"model {path} has no tokenizer.json; --model takes a Hugging Face model directory on disk")
    names = [name for name in TOKENIZER_FILES if (path / name).is_file()]
    names += sorted(FOLDER + file.name for file in (path / FOLDER).glob("*.jinja"))
    return {name: (path / name).read_bytes() for name in names}


def broken_template(model_dir: Path) -> str:
    """Why the model's chat template cannot be used, in one line with its file; empty if it can, or if there is none."""
    if not (model_dir / "tokenizer.json").is_file():
        return ""  # such a model does not start, for that reason
    return template_error(tokenizer_files(model_dir))


def checkpoint_dtype(files: ModelFiles) -> str:
    """The dtype that the model was published in: "float32", "bfloat16" or "float16".

    What config.json says; if it says nothing of use, the dtype of the first tensor in floating point that torch can
    compute with; float32 if there is none.
    """
    for key in ("dtype", "torch_dtype"):  # the second is what older versions of transformers wrote
        if named := files.config.get(key):
            return str(named)
    for file in files.weight_files if not files.is_gguf else ():
        header, _ = read_safetensors_header(file)
        for name, entry in header.items():
            if name != "__metadata__" and isinstance(entry, dict) and entry.get("dtype") in _DTYPES:
                return _DTYPES[entry["dtype"]]
    return "float32"


def model_identity(model_dir: str | Path) -> str:
    """32 hex digits that name the weights: equal for equal copies, different for a fine-tune.

    Hashes what config.json says about the computation and, of each weight file, its size, its header (names, shapes,
    dtypes, offsets) and the 4 KiB in the middle of each of its tensors, of at most 512 tensors at even distances. So
    it reads about 2 MiB a file whatever the model's size, and does not see a change that leaves all of those pages as
    they were. It is no protection against a forger.
    """
    files = open_model(model_dir)
    essentials = {key: value for key, value in files.config.items() if key not in _COSMETIC_KEYS}
    digest = hashlib.blake2b(digest_size=16, person=b"baton-model")
    digest.update(json.dumps(essentials, sort_keys=True).encode())
    for file in files.weight_files:
        if files.is_gguf:
            digest.update(gguf_identity(file).encode())
            continue
        header, data_start = read_safetensors_header(file)
        size = file.stat().st_size
        digest.update(f"\0{file.name}\0{size}\0{json.dumps(header, sort_keys=True)}\0".encode())
        spans = sorted(_data_span(entry, file) for name, entry in header.items() if name != "__metadata__")
        stride = -(-len(spans) // _SAMPLED_PAGES) or 1
        with file.open("rb") as stream:
            for start, end in spans[::stride]:
                middle = data_start + max(start, (start + end - _PAGE) // 2)
                stream.seek(middle)
                digest.update(stream.read(min(_PAGE, end - start)))
    return digest.hexdigest()


def gguf_identity(file: Path) -> str:
    """32 hex digits that name the content of a GGUF file: its size, its first MiB, and up to 512 pages of 4 KiB at even
    distances. Raises `StartupError` if it cannot be read."""
    refuse_lfs_pointer(file)
    digest = hashlib.blake2b(digest_size=16, person=b"baton-gguf")
    try:
        with file.open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(0)
            digest.update(f"{size}\0".encode() + stream.read(1 << 20))
            for start in range(0, size, max(_PAGE, -(-size // _SAMPLED_PAGES))):
                stream.seek(start)
                digest.update(stream.read(_PAGE))
    except OSError as error:
        raise StartupError(f"{file} cannot be read ({error})") from error
    return digest.hexdigest()


def read_safetensors_header(file: Path) -> tuple[dict[str, object], int]:
    """The JSON header of a safetensors file, and the offset in bytes at which its data starts."""
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > _MAX_HEADER:
                raise ValueError(f"header of {length} bytes")
            header = json.loads(stream.read(length))
    except (OSError, struct.error, ValueError) as error:
        raise StartupError(f"{file} is not a readable safetensors file ({error}); download it again") from error
    if not isinstance(header, dict):
        raise StartupError(f"{file} is not a readable safetensors file (header is no object); download it again")
    return header, 8 + length


def _weight_files(path: Path) -> list[Path]:
    if (path / GGUF_WEIGHTS).is_file():
        return parts_of(path / GGUF_WEIGHTS)
    if (path / GGUF_WEIGHTS).is_symlink():
        raise StartupError(f"model {path} refers to {(path / GGUF_WEIGHTS).readlink()}, which is gone")
    index = path / "model.safetensors.index.json"
    if not index.is_file():
        found = sorted(path.glob("*.safetensors"))
        if not found:
            raise StartupError(f"model {path} has no *.safetensors; convert its weights with save_pretrained first")
        return found
    weight_map = _read_json(index, "download it again").get("weight_map")
    if not isinstance(weight_map, dict):
        raise StartupError(f"{index} has no weight_map; download it again")
    files = [path / name for name in sorted(set(map(str, weight_map.values())))]
    for file in files:
        if not file.is_file():
            raise StartupError(f"model {path} lacks {file.name}, which its index names; download it again")
    return files


def _read_json(file: Path, remedy: str) -> dict[str, object]:
    refuse_lfs_pointer(file)
    try:
        value = json.loads(file.read_bytes())
    except FileNotFoundError as error:
        raise StartupError(f"model {file.parent} has no {file.name}; {remedy}") from error
    except (OSError, ValueError) as error:
        raise StartupError(f"{file} cannot be read as JSON ({error}); {remedy}") from error
    if not isinstance(value, dict):
        raise StartupError(f"{file} is not a JSON object; {remedy}")
    return value


def _token_ids(value: object, file: Path) -> list[int]:
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(item, int) and not isinstance(item, bool) for item in ids):
        raise StartupError(f"{file}: eos_token_id has to be an integer or a list of integers, not {value!r}")
    return list(ids)


def _data_span(entry: object, file: Path) -> tuple[int, int]:
    offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
    if not isinstance(offsets, list) or len(offsets) != 2:
        raise StartupError(f"{file} has a tensor without data_offsets; download it again")
    return int(offsets[0]), int(offsets[1])
