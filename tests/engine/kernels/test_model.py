"""A whole model on each variant: logits equal those of transformers, in whatever pieces and company."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from common.errors import StartupError
from common.types import SampledToken
from engine.local.device import LocalDevice
from engine.models import native
from engine.models.decoder import Decoder
from tests.engine.kernels.variants import each_variant
from tests.engine.tiny_models import (
    SHAPES,
    advance,
    bfloat16_errors,
    expected_logprobs,
    make_model,
    make_runner,
    random_sequences,
)

ODD = {"hidden_size": 60, "intermediate_size": 77, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def model(models: Path, name: str) -> Path:
    path = models / name
    return path if path.exists() else make_model(path, ODD if name == "odd" else SHAPES.get(name))


def is_native(runner: LocalDevice) -> bool:
    return isinstance(runner._model, Decoder) and runner._model.native is not None


@each_variant
@pytest.mark.parametrize("name", ["odd", "tied", "biases", "grouped_heads", "llama3_rope"])
def test_logits_equal_transformers(models: Path, variant: str, name: str) -> None:
    path = model(models, name)
    runner = make_runner(path, kernels=variant, num_threads=2)
    assert is_native(runner)
    first, second = random_sequences([70, 40])
    for sizes in ((33, 1), (20, 30), (1, 1), (1, 1), (7, 1), (1, 5), (7, 1)):
        advance(runner, [first, second], sizes)
    for sequence in (first, second):
        expected = expected_logprobs(path, sequence.token_ids)
        for position, logprobs in sequence.logprobs.items():
            torch.testing.assert_close(logprobs, expected[position], atol=2e-4, rtol=0)


@each_variant
def test_a_request_does_not_depend_on_the_batch(models: Path, variant: str) -> None:
    """Bits: alone and among thirteen others, in a chunk of its own size."""
    results = []
    for number in (1, 14):
        runner = make_runner(model(models, "plain"), kernels=variant)
        sequences = random_sequences([40] * number)
        for size in (20, 15, 1, 1, 1, 1, 1):
            advance(runner, sequences, [size] * number)
        results.append(sequences[0].logprobs)
    for position, logprobs in results[0].items():
        assert torch.equal(logprobs, results[1][position])


@each_variant
def test_bfloat16_is_at_most_a_tenth_worse_than_transformers(models: Path, variant: str) -> None:
    ours, theirs = bfloat16_errors(model(models, "plain"), kernels=variant)
    assert ours <= 1.1 * theirs


@each_variant
@pytest.mark.parametrize(("products", "num_calls"), [(0, 3), (800_000, 2), (1 << 30, 1)])
def test_messages_pass_between_calls_that_take_long_enough(
    models: Path, monkeypatch: pytest.MonkeyPatch, variant: str, products: int, num_calls: int
) -> None:
    """Three layers of 27,648 weights, 20 tokens: in a call for each, in two calls, in one. The token is the same."""
    expected = first_token(models, variant, [])
    monkeypatch.setattr(native, "_CALL_PRODUCTS", products)
    calls: list[int] = []
    assert first_token(models, variant, calls) == expected
    assert len(calls) == num_calls


def first_token(models: Path, variant: str, calls: list[int]) -> SampledToken | None:
    runner = make_runner(model(models, "plain"), kernels=variant)
    (sequence,) = random_sequences([20])
    (output,) = runner.execute([sequence.step(20)], meanwhile=lambda: calls.append(1))
    return output


@each_variant
@pytest.mark.parametrize(("quantization", "limit"), [("int8", 0.1), ("int4", 1.0)])
def test_quantised_weights_give_nearly_the_same_logits(
    models: Path, variant: str, quantization: str, limit: float
) -> None:
    path = model(models, "plain")
    runner = make_runner(path, kernels=variant, quantization=quantization)
    (sequence,) = random_sequences([40])
    for size in (30, 8, 1, 1):
        advance(runner, [sequence], [size])
    expected = expected_logprobs(path, sequence.token_ids)
    errors = [(logprobs - expected[position]).square().mean() for position, logprobs in sequence.logprobs.items()]
    assert 1e-4 < torch.stack(errors).mean().sqrt() < limit * expected.std()


@each_variant
def test_kv_of_quantised_weights_is_another_models(models: Path, variant: str) -> None:
    path = model(models, "plain")
    runners = [make_runner(path, kernels=variant, quantization=kind) for kind in ("none", "int8", "int4")]
    assert len({runner.info.spec.fingerprint() for runner in runners}) == 3


def test_quantisation_without_kernels_is_refused(models: Path) -> None:
    with pytest.raises(StartupError, match="--quantization int8 needs the CPU kernels: --kernels torch"):
        make_runner(model(models, "plain"), kernels="torch", quantization="int8")
