"""Weights are read once, in the memory that they take; a bad file or tensor is named."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from mmap import mmap
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.errors import StartupError
from common.model_files import open_model
from engine.loading import progress
from engine.loading.checkpoints import safetensors_file
from engine.loading.checkpoints.safetensors_file import SafetensorsFile
from engine.loading.weights import load_weights
from tests.engine.test_model_families import check
from tests.engine.tiny_models import advance, make_model, make_runner, random_sequences

MIB = 1 << 20
SHAPE: dict[str, object] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 8,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "vocab_size": 2000,
}

# Loads a model, and prints the most anonymous memory that it took for that and what it keeps, in MiB.
SCRIPT = """
import sys, threading
from pathlib import Path
from common.config import EngineSettings
from engine.local.device import LocalDevice

def anonymous():
    (line,) = [line for line in open("/proc/self/status") if line.startswith("RssAnon")]
    return int(line.split()[1]) / 1024

def watch():
    while not done.wait(0.002):
        peaks.append(anonymous())

def load(model):
    settings = {"dtype": sys.argv[3], "num_blocks": 16, "kernels": sys.argv[4], "num_threads": 1}
    settings["quantization"] = sys.argv[5]
    return LocalDevice(Path(model), EngineSettings.model_validate(settings))

kept = load(sys.argv[1])  # what is imported and allocated once
before, peaks, done = anonymous(), [], threading.Event()
thread = threading.Thread(target=watch)
thread.start()
runner = load(sys.argv[2])
done.set()
thread.join()
print(max(peaks) - before, anonymous() - before)
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "large", SHAPE, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("dtype", "itemsize", "kernels"),
    [
        pytest.param("bfloat16", 2, "auto", marks=pytest.mark.slow),
        pytest.param("bfloat16", 2, "torch", marks=pytest.mark.slow),
        pytest.param("float32", 4, "auto", marks=pytest.mark.slow),
        pytest.param("float32", 4, "torch", marks=pytest.mark.slow),
    ],
)
def test_peak_memory(tmp_path: Path, large: Path, dtype: str, itemsize: int, kernels: str) -> None:
    check_peak_memory(make_model(tmp_path / "small"), large, dtype, itemsize, kernels)


def check_peak_memory(small: Path, large: Path, dtype: str, itemsize: int, kernels: str) -> None:
    """`small`: a model of the same type, which shows what is taken once."""
    num_elements = sum(tensor.numel() for tensor in load_file(large / "model.safetensors").values())
    check_memory(small, large, num_elements * itemsize / MIB, dtype, kernels, "none")


def check_memory(small: Path, large: Path, size: float, dtype: str, kernels: str, quantization: str) -> None:
    """`size`: MiB that the weights of `large` take."""
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(small), str(large), dtype, kernels, quantization],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    peak, kept = map(float, result.stdout.split())
    assert size * 0.9 < kept < size * 1.1 + 8
    assert peak < size * 1.1 + 8


@pytest.mark.slow
@pytest.mark.parametrize(("quantization", "itemsize"), [("int8", 1 + 4 / 64), ("int4", 1 / 2 + 4 / 32)])
def test_peak_memory_of_weights_that_are_quantised_as_they_come(
    tmp_path: Path, large: Path, quantization: str, itemsize: float
) -> None:
    small = make_model(tmp_path / "small")
    shapes = {name: tensor.numel() for name, tensor in load_file(large / "model.safetensors").items()}
    size = shapes.pop("model.embed_tokens.weight") * 2 / MIB
    size += shapes.pop("lm_head.weight") * (1 + 4 / 64) / MIB
    size += sum(shapes.values()) * itemsize / MIB
    check_memory(small, large, size, "bfloat16", "auto", quantization)


@pytest.mark.slow
def test_peak_memory_of_a_tied_model(tmp_path: Path) -> None:
    """Its embedding is a third of it, and is the head's weight in the kernels' layout."""
    tied = {**SHAPE, "num_hidden_layers": 4, "vocab_size": 24000, "tie_word_embeddings": True}
    path = make_model(tmp_path / "tied", tied, dtype=torch.bfloat16)
    small = make_model(tmp_path / "small")
    check_peak_memory(small, path, "bfloat16", 2, "auto")
    tensors = load_file(path / "model.safetensors")
    size = sum(tensor.nbytes for tensor in tensors.values()) / MIB
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()  # compared, and left out
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    del tensors
    check_memory(small, path, size, "bfloat16", "auto", "none")


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "itemsize"), [("bfloat16", 2), ("float32", 4)])
@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_peak_memory_on_transformers_code(tmp_path: Path, dtype: str, itemsize: int, kernels: str) -> None:
    small = make_model(tmp_path / "small", {"model_type": "olmo2"})
    large = make_model(tmp_path / "large", {**SHAPE, "model_type": "olmo2"}, dtype=torch.bfloat16)
    check_peak_memory(small, large, dtype, itemsize, kernels)


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_peak_memory_of_experts_on_transformers_code(tmp_path: Path, kernels: str) -> None:
    shape = {
        "model_type": "olmoe",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "pad_token_id": 0,
    }
    small = make_model(tmp_path / "small", shape)
    sizes = {**SHAPE, **shape, "intermediate_size": 512, "num_hidden_layers": 12}
    large = make_model(tmp_path / "large", sizes, dtype=torch.bfloat16)
    check_peak_memory(small, large, "bfloat16", 2, kernels)


def sharded(path: Path) -> list[Path]:
    """The same model in three files with an index."""
    file = path / "model.safetensors"
    tensors = load_file(file)
    file.unlink()
    names = sorted(tensors)
    weight_map = {}
    for number in range(3):
        name = f"model-{number + 1:05}-of-00003.safetensors"
        save_file({each: tensors[each] for each in names[number::3]}, path / name)
        weight_map |= dict.fromkeys(names[number::3], name)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return sorted(path.glob("*.safetensors"))


def test_shards(tmp_path: Path) -> None:
    path = make_model(tmp_path / "model")
    whole = make_runner(path)
    (expected,) = random_sequences([30])
    advance(whole, [expected], [30])
    sharded(path)
    (sequence,) = random_sequences([30])
    advance(make_runner(path), [sequence], [30])
    assert torch.equal(sequence.logprobs[29], expected.logprobs[29])
    check(path, sequence)


def refusal(path: Path) -> str:
    with pytest.raises(StartupError) as caught:
        make_runner(path)
    assert "\n" not in caught.value.message
    return caught.value.message


def test_a_shard_cut_short_is_named(tmp_path: Path) -> None:
    files = sharded(make_model(tmp_path / "model"))
    files[1].write_bytes(files[1].read_bytes()[:-1])
    assert f"{files[1]} is not a readable safetensors file" in refusal(tmp_path / "model")


@pytest.mark.parametrize("content", [b"", b"\x00" * 7, b"\xff" * 64, b"\x02\0\0\0\0\0\0\0[]", b"<html>404</html>"])
def test_a_file_that_is_none_is_named(tmp_path: Path, content: bytes) -> None:
    files = sharded(make_model(tmp_path / "model"))
    files[2].write_bytes(content)
    assert str(files[2]) in refusal(tmp_path / "model")


def test_an_expert_that_is_missing_is_named(tmp_path: Path) -> None:
    path = make_model(tmp_path / "model", {"model_type": "mixtral", "num_local_experts": 4})
    tensors = load_file(path / "model.safetensors")
    del tensors["model.layers.2.block_sparse_moe.experts.3.w2.weight"]
    save_file(tensors, path / "model.safetensors")
    assert "lacks tensor model.layers.2.block_sparse_moe.experts.3.w2.weight" in refusal(path)


def test_a_file_is_read_front_to_back_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wider dtypes lie first in it, so names are in another order."""
    monkeypatch.setattr(safetensors_file, "_PIECE_BYTES", 6000)
    tensors = {
        "matrix": torch.randn(900, 5),
        "cube": torch.randn(1100, 2, 2).bfloat16(),
        "number": torch.tensor(3.0, dtype=torch.float64),
        "nothing": torch.empty(0, 4),
        "row": torch.randn(7),
    }
    save_file(tensors, tmp_path / "file")
    begun: list[int] = []
    with SafetensorsFile(tmp_path / "file") as file:
        read_into = file._read_into
        monkeypatch.setattr(file, "_read_into", lambda number: (begun.append(number), read_into(number))[1])
        rows: dict[str, list[int]] = {}
        for tensor in file.tensors:
            pieces = [(row, piece.clone()) for row, piece in tensor.pieces()]
            rows[tensor.name] = [row for row, _ in pieces]
            whole = [piece for _, piece in pieces] or [torch.empty(0, 4)]
            assert torch.equal(torch.cat(whole) if tensor.shape else whole[0], tensors[tensor.name])
    assert rows == {"number": [0], "matrix": [0, 256, 512, 768], "row": [0], "cube": [0, 750], "nothing": []}
    assert next(iter(rows)) == "number"
    assert begun == list(range(8))
    assert file._places == sorted(file._places)


def test_tensors_that_nobody_asks_for_are_left_out(tmp_path: Path) -> None:
    tensors = {name: torch.full((3,), float(number)) for number, name in enumerate("abcdef")}
    save_file(tensors, tmp_path / "file")
    with SafetensorsFile(tmp_path / "file") as file:
        for tensor in file.tensors[1::2]:
            ((_, piece),) = tensor.pieces()
            assert torch.equal(piece, tensors[tensor.name])


def test_the_next_piece_is_read_while_one_is_used(tmp_path: Path) -> None:
    save_file({"a": torch.randn(4), "b": torch.randn(4)}, tmp_path / "file")
    with SafetensorsFile(tmp_path / "file") as file:
        pieces = file.tensors[0].pieces()
        next(pieces)
        assert file._next is not None
        number, read = file._next
        assert number == 1
        read.result(timeout=60)  # though nobody has asked for it


def test_a_file_that_shrinks_while_it_is_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_model(tmp_path / "model")
    (file,) = open_model(path).weight_files
    places = {name: torch.empty_like(tensor) for name, tensor in load_file(file).items()}
    real = SafetensorsFile.read

    def cut(self: SafetensorsFile, number: int) -> tuple[mmap, int]:
        file.write_bytes(file.read_bytes()[:-100])
        return real(self, number)

    monkeypatch.setattr(SafetensorsFile, "read", cut)
    with pytest.raises(StartupError, match="it ends before byte") as caught:
        load_weights(open_model(path), places)
    assert str(file) in caught.value.message


def test_a_type_that_torch_lacks_is_named(tmp_path: Path) -> None:
    path = make_model(tmp_path / "model")
    (file,) = open_model(path).weight_files
    header = json.dumps({"odd": {"dtype": "U16", "shape": [2], "data_offsets": [0, 4]}}).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    assert f"{file}: tensor odd is U16, which is not supported" in refusal(path)


def test_progress_is_logged_if_nobody_watches(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = open_model(make_model(tmp_path / "model"))
    places = {name: torch.empty_like(tensor) for name, tensor in load_file(files.weight_files[0]).items()}
    with caplog.at_level(logging.INFO, logger=progress.log.name):
        load_weights(files, places, log_interval_s=0.0)
    percents = [vars(record)["percent"] for record in caplog.records if hasattr(record, "percent")]
    assert percents == sorted(percents)
    assert percents[-1] in (98, 99, 100)
