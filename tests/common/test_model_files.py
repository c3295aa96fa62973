"""Model directories: what is checked, what is read, and what names the weights."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import pytest

from common.errors import StartupError
from common.model_files import checkpoint_dtype, model_identity, open_model, read_safetensors_header, tokenizer_files

CONFIG: dict[str, object] = {"architectures": ["X"], "hidden_size": 8, "eos_token_id": 2}


def write_safetensors(file: Path, tensors: dict[str, bytes]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, data in tensors.items():
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    encoded = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(encoded)) + encoded + b"".join(tensors.values()))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    (path / "tokenizer.json").write_text("{}")
    write_safetensors(path / "model.safetensors", {"a": b"x" * 20_000, "b": b"y" * 10, "empty": b""})
    return path


def test_a_whole_directory(model: Path) -> None:
    files = open_model(model)
    assert files.config["hidden_size"] == 8
    assert [file.name for file in files.weight_files] == ["model.safetensors"]


def test_shards_by_index(model: Path) -> None:
    write_safetensors(model / "part-2.safetensors", {"c": b"1"})
    index = {"weight_map": {"c": "part-2.safetensors", "a": "model.safetensors", "b": "model.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    assert [file.name for file in open_model(model).weight_files] == ["model.safetensors", "part-2.safetensors"]
    (model / "part-2.safetensors").unlink()
    with pytest.raises(StartupError, match=r"lacks part-2\.safetensors"):
        open_model(model)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("config.json", "has no config.json"),
        ("tokenizer.json", "has no tokenizer.json"),
        ("model.safetensors", r"has no \*\.safetensors"),
    ],
)
def test_missing_files_are_named(model: Path, name: str, words: str) -> None:
    (model / name).unlink()
    with pytest.raises(StartupError, match=words):
        open_model(model)


@pytest.mark.parametrize("text", ["{", "[]", "\xff"])
def test_a_broken_config_is_named(model: Path, text: str) -> None:
    (model / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(StartupError, match=r"config\.json"):
        open_model(model)


def test_no_directory(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="--model takes"):
        open_model(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        (None, 2, [2]),
        (None, [2, 3], [2, 3]),
        ([7, 8], 2, [7, 8]),
        (7, 2, [7]),
        (None, None, []),
    ],
)
def test_eos_ids(model: Path, generation: object, config: object, expected: list[int]) -> None:
    (model / "config.json").write_text(json.dumps({**CONFIG, "eos_token_id": config}))
    if generation is not None:
        (model / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    assert open_model(model).eos_token_ids == expected


def write_tokenizer(model: Path, config: dict[str, object], name: str = "tokenizer_config.json") -> None:
    tokens = {"vocab": {"a": 0, "</s>": 1}}
    added = [{"id": 7, "content": "<|im_end|>", "special": True}]
    (model / "tokenizer.json").write_text(json.dumps({"model": tokens, "added_tokens": added}))
    (model / name).write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("generation", "config", "token", "expected"),
    [
        (None, 0, "<|im_end|>", {0: "config.json", 7: "tokenizer_config.json"}),
        (None, None, {"content": "<|im_end|>"}, {7: "tokenizer_config.json"}),
        ([1, 7], 0, "<|im_end|>", {1: "generation_config.json", 7: "generation_config.json, tokenizer_config.json"}),
        ([], 0, "</s>", {1: "tokenizer_config.json"}),
        (3, 0, None, {3: "generation_config.json"}),
        (3, 0, "<|no such token|>", {3: "generation_config.json"}),
    ],
)
def test_the_end_that_the_tokenizer_names(
    model: Path, generation: object, config: object, token: object, expected: dict[int, str]
) -> None:
    write_tokenizer(model, {"eos_token": token})
    (model / "config.json").write_text(json.dumps({**CONFIG, "eos_token_id": config}))
    if generation is not None:
        (model / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    files = open_model(model)
    assert files.ends(files.token_ids()) == expected
    assert files.eos_token_ids == list(expected)


def test_the_end_in_other_files(model: Path) -> None:
    write_tokenizer(model, {"eos_token": "<|im_end|>"}, "special_tokens_map.json")
    assert open_model(model).eos_token_ids == [2, 7]
    (model / "tokenizer.json").write_text(json.dumps({"model": {"vocab": [["a", 0.0], ["<|im_end|>", -1.5]]}}))
    assert open_model(model).eos_token_ids == [2, 1]
    (model / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"id": 7, "content": "<|im_end|>"}]}))
    assert open_model(model).token_ids() == {}  # not all of them are known
    (model / "tokenizer_config.json").write_text("{")
    with pytest.raises(StartupError, match=r"tokenizer_config\.json cannot be read"):
        _ = open_model(model).eos_token_ids


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"


@pytest.mark.parametrize(
    "name", ["model.safetensors", "tokenizer.json", "config.json", "tokenizer_config.json", "generation_config.json"]
)
def test_a_git_lfs_pointer_is_named(model: Path, name: str) -> None:
    (model / name).write_bytes(POINTER)
    with pytest.raises(StartupError, match=rf"{name} is a git-lfs pointer .* fetch the file with `git lfs pull`"):
        open_model(model)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("auto", "float16"),  # what the weights have
        ("int3", "float16"),
        (7, "float16"),
        (None, "float16"),
        ("float", "float32"),
        ("half", "float16"),
        ("torch.bfloat16", "bfloat16"),
        ("float32", "float32"),
    ],
)
@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_the_dtype_of_a_checkpoint(model: Path, key: str, given: object, expected: str) -> None:
    header = json.dumps({"a": {"dtype": "F16", "shape": [1], "data_offsets": [0, 2]}}).encode()
    (model / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0\0")
    part = {key: given, "hidden_size": 3}
    (model / "config.json").write_text(json.dumps({**CONFIG, key: given, "text_config": part}))
    files = open_model(model)
    assert checkpoint_dtype(files) == expected
    text = files.config["text_config"]
    assert isinstance(text, dict)
    assert text["hidden_size"] == 3
    assert text.get(key) == files.config.get(key)
    assert files.config.get(key) in (None, "float32", "bfloat16", "float16")


@pytest.mark.parametrize("value", ["2", [2, "x"], True, 1.5])
def test_wrong_eos_ids_are_named(model: Path, value: object) -> None:
    (model / "config.json").write_text(json.dumps({**CONFIG, "eos_token_id": value}))
    with pytest.raises(StartupError, match="eos_token_id"):
        _ = open_model(model).eos_token_ids


def test_tokenizer_files(model: Path) -> None:
    (model / "chat_template.jinja").write_text("hello")
    assert tokenizer_files(model) == {
        "tokenizer.json": b"{}",
        "chat_template.jinja": b"hello",
        "config.json": json.dumps(CONFIG).encode(),
    }
    (model / "tokenizer.json").unlink()
    with pytest.raises(StartupError, match=r"tokenizer\.json"):
        tokenizer_files(model)


def test_copies_have_one_identity(model: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(model, tmp_path / "copy"))
    (copy / "generation_config.json").write_text("{}")
    (copy / "config.json").write_text(json.dumps({**CONFIG, "transformers_version": "9", "dtype": "bfloat16"}))
    assert model_identity(copy) == model_identity(model)
    assert len(model_identity(model)) == 32


def test_identity_changes_with_config_and_weights(model: Path) -> None:
    seen = {model_identity(model)}
    (model / "config.json").write_text(json.dumps({**CONFIG, "hidden_size": 9}))
    seen.add(model_identity(model))
    write_safetensors(model / "model.safetensors", {"a": b"x" * 9_999 + b"z" + b"x" * 10_000, "b": b"y" * 10})
    seen.add(model_identity(model))
    write_safetensors(model / "model.safetensors", {"a": b"x" * 20_000, "b": b"y" * 9 + b"z"})
    seen.add(model_identity(model))
    write_safetensors(model / "model.safetensors", {"a": b"x" * 20_000, "c": b"y" * 9 + b"z"})
    seen.add(model_identity(model))
    assert len(seen) == 5


@pytest.mark.parametrize("data", [b"", b"\x01", struct.pack("<Q", 2**60) + b"{}", struct.pack("<Q", 2) + b"[]"])
def test_a_broken_safetensors_header_is_named(tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "broken.safetensors"
    file.write_bytes(data)
    with pytest.raises(StartupError, match=r"broken\.safetensors"):
        read_safetensors_header(file)
