"""A model that its config.json calls tied and whose files hold a head of its own: computed as transformers does."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.model_files import open_model
from engine.loading.checkpoints import safetensors_file
from engine.loading.checkpoints.own_head import has_own_head
from engine.local.memory import weight_bytes
from tests.engine.test_model_families import check
from tests.engine.tiny_models import advance, edit_config, make_model, make_runner, random_sequences

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def with_own_head(path: Path, model_type: str = "llama") -> Path:
    """A model that says that it is tied, and whose file holds another head."""
    make_model(path, {"model_type": model_type, "tie_word_embeddings": True})
    torch.manual_seed(1)
    tensors = {**load_file(path / "model.safetensors"), HEAD: torch.randn(96, 64)}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "olmo2"])  # the last runs on transformers' code
@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_a_head_unlike_the_embedding_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, model_type: str, kernels: str
) -> None:
    path = with_own_head(tmp_path / "model", model_type)
    (sequence,) = random_sequences([30])
    with caplog.at_level(logging.WARNING):
        advance(make_runner(path, kernels=kernels), [sequence], [30])
    check(path, sequence)
    assert "they are not tied" in caplog.text


def test_a_quantised_model_has_its_head(tmp_path: Path) -> None:
    """--quantization: as a model that says that it is not tied."""
    results = []
    for tied in (True, False):
        path = with_own_head(tmp_path / "model")
        edit_config(path, tie_word_embeddings=tied)
        (sequence,) = random_sequences([30])
        advance(make_runner(path, quantization="int8"), [sequence], [30])
        results.append(sequence.logprobs[29])
    assert torch.equal(*results)


def test_a_head_that_repeats_the_embedding_is_tied(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In another dtype, and in several pieces of which the last alone may differ."""
    monkeypatch.setattr(safetensors_file, "_PIECE_BYTES", 4 * 64 * 512)  # 512 rows of float32, 256 of float64
    plain = make_model(tmp_path / "model", {"tie_word_embeddings": True, "vocab_size": 700})
    num_bytes = weight_bytes(open_model(plain), 4)
    embedding = load_file(plain / "model.safetensors")[EMBEDDING]
    head = plain / "model-head.safetensors"
    save_file({HEAD: embedding.double()}, head)
    path = plain
    assert not has_own_head(open_model(path))
    assert weight_bytes(open_model(path), 4) == num_bytes
    with caplog.at_level(logging.WARNING):
        make_runner(path)
    assert "tied" not in caplog.text
    embedding[-1, -1] += 1
    for dtype in (torch.float64, torch.float32):
        save_file({HEAD: embedding.to(dtype)}, head)
        assert has_own_head(open_model(path))
    assert weight_bytes(open_model(path), 4) == num_bytes + 4 * embedding.numel()


@pytest.mark.parametrize("name", ["lm_head.qweight", "lm_head.weight_packed"])
def test_a_quantised_head_is_its_own(tmp_path: Path, name: str) -> None:
    path = make_model(tmp_path / "model", {"tie_word_embeddings": True})
    save_file({name: torch.zeros(2, 2, dtype=torch.int32)}, path / "model-head.safetensors")
    assert has_own_head(open_model(path))
